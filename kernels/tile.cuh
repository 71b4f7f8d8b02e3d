// A token read's forward in tiles of TILE neighbouring tokens, if a thread has one packet (src/cuda/plan/tile.rs).
//
// A thread keeps the parameters of its features and the window in registers for the whole chunk; ForwardPass loads both for
// every token, from L1 and from shared memory. Tiles arrive in a ring of STAGES in shared memory, each by two bulk copies that
// one thread starts and an mbarrier counts. The block's two barriers are paid for once per tile, and the scalars that follow
// from a token's sums are computed by some of a warp's lanes: lane l has those of token l % TILE.
//
// Sums are added in ForwardPass's order for as many threads and FEATURES, so the results have the same bits.
#pragma once

#include "earlier_tokens.cuh"
#include "forward.cuh"

static_assert(READ == TOKEN && REWRITE && NORM && !PENDING, "the plan keeps to these");
static_assert(
    REWRITES == 1 && NEXT == 1 && TILE >= TAPS && 32 % TILE == 0 && TILE * MAX_SUMS <= 32, "a number per lane");
static_assert(CLUSTER == 1 && PACKETS == THREADS && KEEP_IN_REGISTERS && WINDOW == IN_REGISTERS, "a packet per thread");

// TILE tokens from `first` on. Those before number `begin` are halo tokens; of the chunk there are `left`, all tiles together.
struct Tile {
  long long first;
  int begin, left;

  DEVICE int end() const { return left < TILE ? left : TILE; }
  DEVICE bool owns(int t) const { return t >= begin && t < left; }
  DEVICE bool is_whole() const { return begin == 0 && left >= TILE; }
  DEVICE Tile ahead(int tiles) const { return {first + tiles * TILE, 0, left - tiles * TILE}; }
};

// The tiles that are on their way or in use: X and k of their tokens.
struct TileRing {
  static constexpr int STATE_BYTES = D * M * static_cast<int>(sizeof(STATE_T));  // of a token
  static constexpr int DIRECTION_BYTES = D * static_cast<int>(sizeof(DIRECTION_T));

  const RewriteRead& args;
  unsigned char* shared;
  MBarrier (&arrived)[STAGES];
  int stage = 0;  // the stage of the current tile
  unsigned parity = 0;

  __device__ TileRing(const RewriteRead& args, unsigned char* shared, MBarrier (&arrived)[STAGES])
      : args(args), shared(shared), arrived(arrived) {
    MBarrier::init(arrived);
  }
  DEVICE unsigned char* states(int stage) const { return shared + stage * TILE * (STATE_BYTES + DIRECTION_BYTES); }
  DEVICE unsigned char* directions(int stage) const { return states(stage) + TILE * STATE_BYTES; }

  // Starts the copies of a tile, if it has tokens. Every thread must have read the stage.
  DEVICE void request(const Tile& tile, int stage) const {
    if (threadIdx.x > 0 || tile.left <= 0) return;
    MBarrier& counter = arrived[stage];
    counter.expect_tx(tile.end() * (STATE_BYTES + DIRECTION_BYTES));
    counter.cp_async_bulk(states(stage), args.state + tile.first * (D * M), tile.end() * STATE_BYTES);
    counter.cp_async_bulk(directions(stage), args.direction + tile.first * D, tile.end() * DIRECTION_BYTES);
  }
  DEVICE void wait() const { arrived[stage].wait(parity); }
  // Loads the thread's packets of token t. Beyond the chunk they are numbers of an earlier tile, or anything.
  DEVICE void load(int t, Config::State& state, Config::Directions& direction) const {
    state.load_cached(reinterpret_cast<const STATE_T*>(states(stage) + t * STATE_BYTES) + column_of(0) * M);
    direction[0].load_cached(
        reinterpret_cast<const DIRECTION_T*>(directions(stage) + t * DIRECTION_BYTES) + column_of(0));
  }
  // Refills the stage of the current tile, and turns to the next one.
  DEVICE void advance(const Tile& refill) {
    request(refill, stage);
    stage = stage + 1 < STAGES ? stage + 1 : 0;
    if (stage == 0) parity ^= 1;
  }
};

struct TilePass {
  struct Buffer {
    BlockSum<TILE * MAX_SUMS>::Buffer sums;
    MBarrier arrived[STAGES];
  };

  const RewriteRead& args;
  const Chunk chunk;
  TileRing ring;
  Config::EarlierTokens earlier;
  BlockSum<TILE * MAX_SUMS> sum;
  Parameters parameters;
  // Of the lane's token: its number in the tile and its position in the sequence; and, loaded a tile ahead, v, β and whether
  // the window starts with it.
  const int mine = static_cast<int>(threadIdx.x) % TILE;
  int position;
  Real value[M], gate;
  bool starts;

  __device__ TilePass(const RewriteRead& args, Buffer& buffer, unsigned char* shared)
      : args(args), chunk(args), ring(args, shared, buffer.arrived), earlier(args, nullptr), sum(buffer.sums) {
    parameters.load(args, feature_of(0));
  }

  DEVICE void load_operands(const Tile& tile) {
    starts = position == 0;
    if (mine >= tile.left) return;
    const long long token = tile.first + mine;
#pragma unroll
    for (int j = 0; j < M; ++j) value[j] = args.value[token * M + j];
    gate = args.gate[token];
    starts |= starts_document(args, token);
  }

  // Puts token t's numbers among those of the tile: n·TILE + t is the place of number n.
  template <int N> static DEVICE void put(const Real (&numbers)[N], int t, Real (&all)[TILE * N]) {
#pragma unroll
    for (int n = 0; n < N; ++n) all[n * TILE + t] = numbers[n];
  }
  // Adds up all numbers of the tile over the block. Returns those of the lane's token.
  template <int N> DEVICE void add_up(const Real (&all)[TILE * N], Real (&numbers)[N]) {
    sum.start(all);
    const Real one = sum.template finish_one_per_lane<TILE * N>();
#pragma unroll
    for (int n = 0; n < N; ++n) numbers[n] = __shfl_sync(FULL_MASK, one, n * TILE + mine);
  }

  // Processes a tile, which has been requested, and requests the one that will have its stage.
  DEVICE void run(const Tile& tile) {
    Config::State state[TILE];
    Config::Directions direction[TILE];
    ring.wait();
#pragma unroll
    for (int t = 0; t < TILE; ++t) ring.load(t, state[t], direction[t]);
    Rewrite rewrites[REWRITES];
    compare(tile, state, direction, rewrites);
    ring.advance(tile.ahead(STAGES));  // after the sum's barrier: every thread has read its part of the stage
    const unsigned window_starts = __ballot_sync(FULL_MASK, starts) % (1u << TILE);
    const int time = static_cast<int>(args.time);
    position += TILE;
    if (position >= time) position %= time;
    load_operands(tile.ahead(1));
    // Nearly all tiles are plain. Code for these alone is a fifth shorter.
    if (tile.is_whole() && window_starts == 0) read<true>(tile, 0, rewrites[0], state, direction);
    else read<false>(tile, window_starts, rewrites[0], state, direction);
  }

  // The first sum, and from it r, p and the factors of the lane's token.
  DEVICE void compare(
      const Tile& tile, const Config::State (&state)[TILE], const Config::Directions (&direction)[TILE],
      Rewrite (&rewrites)[REWRITES]) {
    Real all[TILE * FIRST_SUMS], sums[FIRST_SUMS];
#pragma unroll
    for (int t = 0; t < TILE; ++t) {
      Real products[FIRST_SUMS] = {};
      add_products(0, state[t], direction[t], products);
      put(products, t, all);
    }
    add_up(all, sums);
    measure(args, 0, sums, rewrites);
    rewrites[0].finish(value, gate);
    if (tile.owns(mine) && writes(0)) save(args, tile.first + mine, rewrites, sums);
  }

  // X → X', the second sum, and h. PLAIN: all tokens are the chunk's own, and the window starts with none of them.
  template <bool PLAIN>
  DEVICE void read(
      const Tile& tile, unsigned window_starts, const Rewrite& of_lane, Config::State (&state)[TILE],
      const Config::Directions (&direction)[TILE]) {
    Real x[TILE][FEATURES], all[TILE * READ_SUMS], sums[READ_SUMS];
#pragma unroll
    for (int t = 0; t < TILE; ++t) {
      const bool own = PLAIN || tile.owns(t);  // halo tokens are not stored: another block stores them
      rewrite(tile.first + t, own, broadcast(of_lane, t), state[t], direction[t]);
      if (!PLAIN && window_starts >> t & 1) earlier.window.clear();
      earlier.compress(state[t], tile.first + t, 0, own, x[t]);
      earlier.advance();
      ReadSums share = {};
      add_read(parameters, x[t], share);
      put(share, t, all);
    }
    add_up(all, sums);
    const Real rstd = PLAIN || tile.owns(mine) ? finish_read(args, tile.first + mine, sums) : Real(0);
#pragma unroll
    for (int t = 0; t < TILE; ++t) {
      const Real of_token = __shfl_sync(FULL_MASK, rstd, t);
      if (PLAIN || tile.owns(t)) store_context(args, parameters, tile.first + t, 0, of_token, x[t]);
    }
  }

  // Token t's rewrite, of which `rewritten` needs the factors.
  static DEVICE Rewrite broadcast(const Rewrite& of_lane, int t) {
    Rewrite rewrite;
#pragma unroll
    for (int j = 0; j < M; ++j) rewrite.factor[j] = __shfl_sync(FULL_MASK, of_lane.factor[j], t);
    return rewrite;
  }

  DEVICE void rewrite(
      long long token, bool own, const Rewrite& of_token, Config::State& state, const Config::Directions& k) const {
    state = rewritten(state, k, {of_token});
    if (own) state.store_streaming(packet_of<M>(args.new_state, token, 0));
  }

  // Starts with the K − 1 halo tokens before the chunk, as far as they are of the same sequence.
  DEVICE void walk() {
    const long long before = chunk.first % args.time;
    const int halo = before < TAPS - 1 ? static_cast<int>(before) : TAPS - 1;
    position = static_cast<int>((before - halo + mine) % args.time);
    Tile tile{chunk.first - halo, halo, static_cast<int>(chunk.last + 1 - chunk.first) + halo};
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) ring.request(tile.ahead(stage), stage);
    load_operands(tile);
    earlier.window.clear();
    for (; tile.left > 0; tile = tile.ahead(1)) run(tile);
  }
};
