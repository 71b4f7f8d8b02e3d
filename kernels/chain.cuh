// The backward's policies for X: it was stored, or it is made from an anchor, an earlier X, by the rewrites since then.
//
// Of each such rewrite k (D) and 2 + 2M numbers are read, which L1 serves to all but one warp. X gets the bits that it had.
#pragma once

#include "token_stream.cuh"

// A link of the chain: the inputs and the saved stats of one call's rewrites.
struct Link {
  const DIRECTION_T* direction;
  const Real* value;
  const Real* gate;
  const Real* stats;

  DEVICE void load(long long token, Rewrite (&rewrites)[REWRITES]) const {
#pragma unroll
    for (int n = 0; n < REWRITES; ++n) {
      const Real* const from = stats + token * STATS + stats_before(n);
      Rewrite& rewrite = rewrites[n];
      Real value[M];
      rewrite.r = from[0];
#pragma unroll
      for (int j = 0; j < M; ++j) {
        rewrite.readout[j] = from[1 + j];
        value[j] = this->value[(token * REWRITES + n) * M + j];
      }
      rewrite.finish(value, gate[token * REWRITES + n]);
    }
  }
};

// The rewrites that lead from the anchor, which is `state`, to X.
struct Chain {
  static constexpr int MOST = 31;
  Link links[MOST];
  long long length;
};

// `state` is X.
template <> struct StateSource<false> {
  __device__ explicit StateSource(const Chain&) {}
  DEVICE void prefetch(long long, int) const {}
  DEVICE void rewrite(TokenStream<STATE_T, M>&, long long, int, bool) const {}
};

// `state` is an anchor. The next link's k and numbers are requested before a link is applied, so that a token waits for
// memory about once and not once for each of its links and rows.
template <> struct StateSource<true> {
  const Chain& chain;

  __device__ explicit StateSource(const Chain& chain) : chain(chain) {}
  DEVICE const DIRECTION_T* direction(int link, int n, long long token, int row) const {
    return packet_of(chain.links[link].direction, token * REWRITES + n, row);
  }
  DEVICE void prefetch(long long token, int row) const {
    for (int link = 0; link < chain.length; ++link)
#pragma unroll
      for (int n = 0; n < REWRITES; ++n) ptx::prefetch_l2(direction(link, n, token, row));
    if (row == 0) prefetch_numbers(token);
  }
  // Each link's numbers by one thread. They were stored so long ago that without this every link would wait for device
  // memory. The stats of a token may lie in two sectors.
  DEVICE void prefetch_numbers(long long token) const {
    const int link = static_cast<int>(threadIdx.x);
    if (link >= chain.length) return;
    const Link& from = chain.links[link];
    ptx::prefetch_l2(from.stats + token * STATS);
    ptx::prefetch_l2(from.stats + token * STATS + STATS - 1);
    ptx::prefetch_l2(from.value + token * (REWRITES * M));
    ptx::prefetch_l2(from.gate + token * REWRITES);
  }

  // A link's share of a token, for the rows that are loaded together.
  struct Loaded {
    Config::Directions k[KEPT_ROWS];
    Rewrite rewrites[REWRITES];
  };
  DEVICE void load(int link, long long token, int first_row, bool again, Loaded& to) const {
#pragma unroll
    for (int row = 0; row < KEPT_ROWS; ++row) {
      if (!is_inside(first_row + row)) continue;
#pragma unroll
      for (int n = 0; n < REWRITES; ++n) {
        const DIRECTION_T* const from = direction(link, n, token, first_row + row);
        if (again) to.k[row][n].load_cached(from);
        else to.k[row][n].load_streaming(from);
      }
    }
    chain.links[link].load(token, to.rewrites);
  }
  // Anchor → X of KEPT_ROWS rows, rounded after each link, as the forwards stored it. `again` as in TokenStream.
  DEVICE void rewrite(TokenStream<STATE_T, M>& state, long long token, int first_row, bool again) const {
    if (chain.length == 0) return;
    Loaded next;
    load(0, token, first_row, again, next);
    for (int link = 0; link < chain.length; ++link) {
      const Loaded now = next;
      if (link + 1 < chain.length) load(link + 1, token, first_row, again, next);
#pragma unroll
      for (int row = 0; row < KEPT_ROWS; ++row)
        if (is_inside(first_row + row)) state[row] = rewritten(state[row], now.k[row], now.rewrites);
    }
  }
};
