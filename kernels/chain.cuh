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
      const Real* const gates = gate + token * REWRITE_GATES;
      rewrite.finish(value, gates[n], gates[ERASE == APART ? REWRITES + n : n]);
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
  DEVICE void rewrite(Config::State&, long long, int, bool) const {}
};

// `state` is an anchor.
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
  }
  // Anchor → X of a row, rounded after each link, as the forwards stored it. `again` as in TokenStream.
  DEVICE void rewrite(Config::State& state, long long token, int row, bool again) const {
    Config::Directions k;
    for (int link = 0; link < chain.length; ++link) {
#pragma unroll
      for (int n = 0; n < REWRITES; ++n) {
        if (again) k[n].load_cached(direction(link, n, token, row));
        else k[n].load_streaming(direction(link, n, token, row));
      }
      Rewrite rewrites[REWRITES];
      chain.links[link].load(token, rewrites);
      state = rewritten(state, k, rewrites);
    }
  }
};
