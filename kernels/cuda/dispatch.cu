// Around the products of experts.cu: pairs of a row and one of its experts sorted by expert, and their results added up.
//
// Pair p is row p / chosen's choice p % chosen; all counts are the device's, so that one recorded launch serves every routing.

// One block of 1024 threads: order[..] gets the pairs by expert, those of an expert ascending; tiles [max_tiles][4] gets (expert, first, count,
// 0) for every run of up to tile_pairs pairs of one expert, ascending; count 0 in those past the last.
// Dynamic shared memory: int [32][experts]. Limits: 1024 experts, 2^20 pairs.
extern "C" __global__ void __launch_bounds__(1024)
    group_pairs(const int* expert_ids, int* order, int4* tiles, int pairs, int experts, int tile_pairs, int max_tiles) {
    extern __shared__ int counts[];  // [warp][expert]: how many pairs the warp's share has, then where its next one goes
    __shared__ int warp_pairs[32], warp_tiles[32], all_tiles;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, expert = threadIdx.x;
    int* own = counts + warp * experts;
    let_next_start();
    for (int e = lane; e < experts; e += 32) own[e] = 0;
    after_previous();
    __syncwarp();
    // Each warp has a run of pairs; lanes of one expert go together, the lowest of them counts.
    const int begin = (int)((long long)pairs * warp / 32), end = (int)((long long)pairs * (warp + 1) / 32);
    for (int first = begin; first < end; first += 32) {
        const int p = first + lane, e = p < end ? expert_ids[p] : -1;
        const u32 peers = __match_any_sync(~0u, e);
        if (e >= 0 && lane == __ffs(peers) - 1) own[e] += __popc(peers);
        __syncwarp();
    }
    __syncthreads();
    int total = 0;
    if (expert < experts)
        for (int w = 0; w < 32; w++) total += counts[w * experts + expert];
    const int own_tiles = (total + tile_pairs - 1) / tile_pairs;
    // Pairs and tiles of the experts before.
    int pairs_before = total, tiles_before = own_tiles;
    for (int d = 1; d < 32; d <<= 1) {
        const int a = __shfl_up_sync(~0u, pairs_before, d), b = __shfl_up_sync(~0u, tiles_before, d);
        if (lane >= d) {
            pairs_before += a;
            tiles_before += b;
        }
    }
    if (lane == 31) {
        warp_pairs[warp] = pairs_before;
        warp_tiles[warp] = tiles_before;
    }
    __syncthreads();
    for (int w = 0; w < warp; w++) {
        pairs_before += warp_pairs[w];
        tiles_before += warp_tiles[w];
    }
    if (threadIdx.x == 1023) all_tiles = tiles_before;
    pairs_before -= total;
    tiles_before -= own_tiles;
    if (expert < experts) {
        for (int t = 0; t < own_tiles; t++)
            tiles[tiles_before + t] = make_int4(expert, pairs_before + t * tile_pairs, min(total - t * tile_pairs, tile_pairs), 0);
        for (int w = 0; w < 32; w++) {
            const int count = counts[w * experts + expert];
            counts[w * experts + expert] = pairs_before;
            pairs_before += count;
        }
    }
    __syncthreads();
    for (int first = begin; first < end; first += 32) {
        const int p = first + lane, e = p < end ? expert_ids[p] : -1;
        const u32 peers = __match_any_sync(~0u, e);
        if (e >= 0) order[own[e] + __popc(peers & ((1u << lane) - 1))] = p;
        __syncwarp();
        if (e >= 0 && lane == __ffs(peers) - 1) own[e] += __popc(peers);
        __syncwarp();
    }
    for (int t = all_tiles + threadIdx.x; t < max_tiles; t += 1024) tiles[t] = make_int4(0, 0, 0, 0);
}

// out[r] += the sum over j, ascending, of shares[r, j] * y[r * chosen + j]: a chain of fused multiply-adds from zero, then one addition.
// grid (rows, ceil(K / 1024)), 256 threads; y [rows * chosen, K], out [rows, K], K a multiple of 4.
extern "C" __global__ void __launch_bounds__(256) combine(const float* y, const float* shares, float* out, int K, int chosen) {
    const int row = blockIdx.x, i = blockIdx.y * 256 + threadIdx.x;
    let_next_start();
    after_previous();
    if (i * 4 >= K) return;
    const float4* from = (const float4*)(y + (size_t)row * chosen * K) + i;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int j = 0; j < chosen; j++) {
        const float share = shares[row * chosen + j];
        const float4 v = from[(size_t)j * (K / 4)];
        sum.x = __fmaf_rn(share, v.x, sum.x);
        sum.y = __fmaf_rn(share, v.y, sum.y);
        sum.z = __fmaf_rn(share, v.z, sum.z);
        sum.w = __fmaf_rn(share, v.w, sum.w);
    }
    float4* to = (float4*)(out + (size_t)row * K) + i;
    const float4 before = *to;
    *to = make_float4(__fadd_rn(before.x, sum.x), __fadd_rn(before.y, sum.y), __fadd_rn(before.z, sum.z), __fadd_rn(before.w, sum.w));
}
