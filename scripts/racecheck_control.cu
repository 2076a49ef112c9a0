//     nvcc -arch=sm_90a -o pair scripts/racecheck_control.cu && compute-sanitizer --tool racecheck ./pair one 12
//
// What racecheck makes of a warp that fills shared memory for other warps behind an mbarrier, in stages that come around:
//   one    every lane writes, the warp meets (bar.warp.sync), an elected lane arrives (the barrier counts warps)
//   all    every lane writes and arrives (the barrier counts lanes)
//   meet   as `all`, but the warp meets before
//   named  as `one`, but the warp meets at a named barrier of 32 threads, which ptxas keeps: of `one` no instruction is left
//          where the warp is converged, so that `one` and `never` run the same instructions, and racecheck sees those
//   never  an elected lane arrives and the warp does not meet: a race, which racecheck must name
//   tma    as `one`, and another warp arrives at the same barrier with the bytes of a bulk copy, as the GEMM's producer
// Consumers wait for the full barrier, read, meet, and one lane of each arrives at the empty barrier (`_r`: all lanes).
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>

constexpr int kStages = 4, kLanes = 32, kConsumerWarps = 4, kFloats = 4;
enum Mode { kOne, kAll, kMeet, kNamed, kNever, kTma };

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void init(uint64_t* b, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive(uint64_t* b) {
  asm volatile("{ .reg .b64 s; mbarrier.arrive.shared.b64 s, [%0], 1; }" ::"r"(shared_address(b)) : "memory");
}
__device__ __forceinline__ void arrive_expect(uint64_t* b, uint32_t bytes) {
  asm volatile("{ .reg .b64 s; mbarrier.arrive.expect_tx.shared.b64 s, [%0], %1; }" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait(uint64_t* b, uint32_t parity) {
  asm volatile(
      "{ .reg .pred p; L: mbarrier.try_wait.parity.shared.b64 p, [%0], %1, 10000000; @p bra.uni D; bra.uni L; D: }" ::"r"(
          shared_address(b)), "r"(parity) : "memory");
}
__device__ __forceinline__ bool elect() {
  uint32_t pred;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(pred));
  return pred != 0;
}

template <Mode mode, bool readers_all>
__global__ void __launch_bounds__((kConsumerWarps + 2) * 32) pair(const float* in, float* out, int rounds) {
  __shared__ alignas(16) float scales[kStages][kLanes][kFloats];
  __shared__ alignas(128) float bulk[kStages][kLanes];
  __shared__ uint64_t full[kStages], empty[kStages];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      init(full + s, (mode == kAll || mode == kMeet ? 32 : 1) + (mode == kTma ? 1 : 0));
      init(empty + s, kConsumerWarps * (readers_all ? 32 : 1));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (warp == kConsumerWarps + 1) {
    if (mode == kTma)
      _Pragma("unroll 1") for (int k = 0; k < rounds; ++k) {
        const int s = k % kStages;
        wait(empty + s, (k / kStages & 1) ^ 1);
        if (elect()) {
          arrive_expect(full + s, sizeof bulk[s]);
          asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                           shared_address(bulk[s])), "l"(in), "r"((uint32_t)sizeof bulk[s]), "r"(shared_address(full + s)) : "memory");
        }
        __syncwarp();
      }
  } else if (warp == kConsumerWarps) {
    _Pragma("unroll 1") for (int k = 0; k < rounds; ++k) {
      const int s = k % kStages;
      const float x = in[lane] * (k + 1);
      wait(empty + s, (k / kStages & 1) ^ 1);
      *reinterpret_cast<float4*>(scales[s][lane]) = make_float4(x, 2 * x, 3 * x, 4 * x);
      if (mode == kAll) {
        arrive(full + s);
      } else if (mode == kMeet) {
        __syncwarp();
        arrive(full + s);
      } else {
        if (mode == kNamed) asm volatile("bar.sync 1, 32;" ::: "memory");
        if (mode != kNever && mode != kNamed) asm volatile("bar.warp.sync -1;" ::: "memory");
        if (elect()) arrive(full + s);
      }
    }
  } else {
    float sum = 0;
    _Pragma("unroll 1") for (int k = 0; k < rounds; ++k) {
      const int s = k % kStages;
      wait(full + s, k / kStages & 1);
      // Four threads have one quad's products, as WGMMA's accumulators have rows.
      const float4 x = *reinterpret_cast<const float4*>(scales[s][warp * 8 + lane / 4]);
      sum += x.x + x.y + x.z + x.w;
      if (readers_all) {
        arrive(empty + s);
      } else {
        __syncwarp();
        if (elect()) arrive(empty + s);
      }
    }
    out[threadIdx.x] = sum;
  }
}

template <Mode mode, bool readers_all>
int run(const char* name, int rounds) {
  float host[32], *in, *out, found[kConsumerWarps * 32];
  for (int i = 0; i < 32; ++i) host[i] = i + 1;
  cudaMalloc(&in, sizeof host);
  cudaMalloc(&out, sizeof found);
  cudaMemcpy(in, host, sizeof host, cudaMemcpyHostToDevice);
  pair<mode, readers_all><<<1, (kConsumerWarps + 2) * 32>>>(in, out, rounds);
  const cudaError_t error = cudaDeviceSynchronize();
  cudaMemcpy(found, out, sizeof found, cudaMemcpyDeviceToHost);
  int wrong = 0;
  for (int t = 0; t < kConsumerWarps * 32; ++t)
    wrong += found[t] != 10.0f * (t / 32 * 8 + t % 32 / 4 + 1) * (rounds * (rounds + 1) / 2);
  printf("%s: %s, %d of %d sums wrong\n", name, cudaGetErrorString(error), wrong, kConsumerWarps * 32);
  return error != cudaSuccess || wrong;
}

int main(int argc, char** argv) {
  const char* name = argc > 1 ? argv[1] : "one";
  const int rounds = argc > 2 ? atoi(argv[2]) : 12;
#define CASE(word, mode)                                                     \
  if (!strcmp(name, word)) return run<mode, false>(name, rounds);            \
  if (!strcmp(name, word "_r")) return run<mode, true>(name, rounds);
  CASE("one", kOne)
  CASE("all", kAll)
  CASE("meet", kMeet)
  CASE("named", kNamed)
  CASE("never", kNever)
  CASE("tma", kTma)
  return 2;
}
