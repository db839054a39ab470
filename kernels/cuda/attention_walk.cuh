// Which tiles of keys and values a block of attention.cu goes over, in which order.
//
// A query tile is up to 16 / G rows of one sequence that follow each other; with the G query heads of a KV head they fill the 16 rows of an
// mma. A segment is a query tile, a KV head, and tiles of keys and values that follow each other, whole splits of them. A block goes over
// segments, and loads ahead across their borders: `Walk` stands at the tile that is loaded next.

constexpr int KV_TILE = 64, SPLIT_TILES = 4, SPLIT = KV_TILE * SPLIT_TILES;

DEVICE int kv_tiles(int positions) { return (positions + KV_TILE - 1) / KV_TILE; }

// Where block b of `blocks` begins: tile z of KV head `head` of query tile t. All tiles of keys and values stand in a line, by query tile,
// head, position; it is cut into equal parts, and each cut moved on to where a split begins. Gives the place in that line.
DEVICE int cut(const int* starts, int tiles, int kv_heads, int b, int blocks, int& t, int& head, int& z) {
    const int all = starts[tiles] * kv_heads, at = (int)((u64)b * all / blocks);
    int after = tiles;
    for (t = 0; after - t > 1;) {
        const int middle = (t + after) >> 1;
        if (starts[middle] * kv_heads <= at) t = middle;
        else after = middle;
    }
    if (at >= all) return all;
    const int own = starts[t + 1] - starts[t], inner = at - starts[t] * kv_heads;
    head = inner / own;
    z = (inner % own + SPLIT_TILES - 1) / SPLIT_TILES * SPLIT_TILES;
    if (z >= own) z = 0, head++;
    if (head < kv_heads) return starts[t] * kv_heads + head * own + z;
    head = 0;
    return starts[++t] * kv_heads;
}

// tiles [max_tiles]: first row, number of rows (0: none), positions that its last row sees, sequence. A row starts a query tile if it is the
// first of all, or of its sequence, or its position is divisible by `most`: it knows by itself whether it does.
// With blocks > 0, for attend_splits: starts [max_tiles + 1], the tiles of keys and values of all query tiles before; work [blocks][2], the
// query tile, KV head and tile that a block begins with and how many tiles of keys and values it goes over, then that query tile's record.
extern "C" __global__ void __launch_bounds__(1024)
    query_tiles(const int* positions, const int* sequences, int4* tiles, int* starts, int4* work, int rows, int most, int max_tiles,
                int kv_heads, int blocks) {
    __shared__ u64 warp_totals[32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    let_next_start();
    after_previous();
    // The sum of what the threads before this one give, and of what all give.
    auto sums = [&](u64 own, u64& all) {
        u64 sum = own;
        UNROLL for (int d = 1; d < 32; d <<= 1) {
            const u64 before = __shfl_up_sync(~0u, sum, d);
            if (lane >= d) sum += before;
        }
        __syncthreads();
        if (lane == 31) warp_totals[warp] = sum;
        __syncthreads();
        sum -= own;
        all = 0;
        for (int w = 0; w < 32; w++) {
            if (w == warp) sum += all;
            all += warp_totals[w];
        }
        return sum;
    };
    int count = 0;
    for (int first = 0; first < rows; first += 1024) {
        const int row = first + threadIdx.x;
        const bool starts_one = row < rows && (row == 0 || sequences[row] != sequences[row - 1] || positions[row] % most == 0);
        u64 all;
        const int place = count + (int)sums(starts_one, all);
        if (starts_one) {
            int n = 1;
            while (n < most && row + n < rows && sequences[row + n] == sequences[row] && positions[row + n] % most != 0) n++;
            tiles[place] = make_int4(row, n, positions[row + n - 1] + 1, sequences[row]);
        }
        count += (int)all;
    }
    for (int t = count + threadIdx.x; t < max_tiles; t += 1024) tiles[t] = make_int4(0, 0, 0, 0);
    if (blocks == 0) return;
    __syncthreads();
    u64 total = 0;  // tiles of keys and values, and splits in the upper half
    for (int first = 0; first < count; first += 1024) {
        const int t = first + threadIdx.x, own = t < count ? kv_tiles(tiles[t].z) : 0;
        u64 all;
        const u64 before = total + sums(own | (u64)((own + SPLIT_TILES - 1) / SPLIT_TILES) << 32, all);
        if (t < count) starts[t] = (int)before;
        total += all;
    }
    if (threadIdx.x == 0) starts[count] = (int)total;
    __syncthreads();
    // No more blocks than splits: the first ones are all on multiprocessors of their own.
    const u64 splits = (total >> 32) * kv_heads;
    const int used = splits < blocks ? (int)splits : blocks;
    for (int b = threadIdx.x; b < blocks; b += 1024) {
        int t = 0, head = 0, z = 0, t_after, head_after, z_after, left = 0;
        if (b < used) {
            const int from = cut(starts, count, kv_heads, b, used, t, head, z);
            left = cut(starts, count, kv_heads, b + 1, used, t_after, head_after, z_after) - from;
        }
        work[b * 2] = make_int4(t, head, z, left);
        if (left) work[b * 2 + 1] = tiles[t];
    }
}

// What a walk reads: the paged pool's tables, and query tiles.
struct Tables {
    const int* blocks;
    int width, shift, kv_heads;
    const int4* tiles;
};

// Uniform in a block, but for the ids, of which a lane has its own. ACROSS: over several segments.
template <bool ACROSS>
struct Walk {
    int t, head, tile, left;  // left: how many more are to be loaded
    int length, sequence;     // of query tile t: positions that its last row sees
    int next_length, next_sequence;
    int begin;                // positions before it are seen by no row of the query tile
    u32 ids, next_ids;        // of the blocks of this split, and of the split that is walked next

    DEVICE int end() const { return kv_tiles(length); }

    // The id of the lane's block of the split that starts with that tile.
    DEVICE u32 load_ids(const Tables& tables, int length, int sequence, int tile) const {
        const int lane = threadIdx.x & 31, p = tile * KV_TILE + (lane << tables.shift);
        const bool there = p < length && lane < SPLIT >> tables.shift && p + (1 << tables.shift) > begin;
        return there ? (u32)tables.blocks[(size_t)sequence * tables.width + (p >> tables.shift)] : 0;
    }

    DEVICE void enter_split(const Tables& tables) {
        const int after = tile + SPLIT_TILES;
        ids = next_ids;
        if (left <= min(SPLIT_TILES, end() - tile)) return;
        if (after < end()) next_ids = load_ids(tables, length, sequence, after);
        else if (!ACROSS) return;
        else if (head + 1 < tables.kv_heads) next_ids = load_ids(tables, length, sequence, 0);
        else next_ids = load_ids(tables, next_length, next_sequence, 0);
    }

    DEVICE void enter_query_tile(const Tables& tables) {
        if (!ACROSS || left <= (tables.kv_heads - head) * end() - tile) return;
        const int4 record = tables.tiles[t + 1];
        next_length = record.z;
        next_sequence = record.w;
    }

    DEVICE void start(const Tables& tables) {
        next_ids = load_ids(tables, length, sequence, tile);
        enter_query_tile(tables);
        enter_split(tables);
    }

    // To the next tile; whether that one begins a segment.
    DEVICE bool advance(const Tables& tables) {
        tile++;
        if (--left == 0) return false;
        const bool segment = ACROSS && tile == end();
        if (segment) {
            tile = 0;
            if (++head == tables.kv_heads) {
                head = 0;
                t++;
                length = next_length;
                sequence = next_sequence;
                enter_query_tile(tables);
            }
        }
        if (tile % SPLIT_TILES == 0) enter_split(tables);
        return segment;
    }
};
