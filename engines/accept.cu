// The accept step on the device: from a target's logits to a verdict, so that logits never leave the GPU.
//
// Contract: the same bits as the NumPy reference (runner/sampling.py is the specification; runner/arithmetic.py,
// noise.py, filters.py, processors.py, acceptor.py and rejection.py are its parts). Compile without fused
// multiply-add (-fmad=false). Probability mass is counted in integers, maxima are taken of (value, token) pairs
// packed into integers: no result depends on block size, schedule or device.
//
// Rows: request b has rows_per_request rows of logits. Row 0 follows the last committed token, row r follows the
// proposed node r - 1; tokens[r] is that node's token, parents[r] its parent's row. One round of the coupled rule:
//
//     process    logits of any type -> float32, processors applied      grid (chunks, rows)
//     summarize  largest logit and filter threshold of each row         grid (rows)
//     add_noise  logits -> score + Gumbel noise, in place               grid (chunks, rows)
//     best       the best tokens of each row: the choices               grid (rows)
//     walk       the path of accepted nodes, and the next token         grid (requests), 32 threads
//
// The commit of a tree's path is gather_rows: its rows of the KV cache are moved together.
//
// The rejection rule (chains) goes process, summarize, reject. A draft's guesses take process to best, with
// `probabilities` before add_noise where the rejection rule will judge them. Blocks have a multiple of 32 threads.
// Everything that changes from round to round lies in device memory, so the launches can be captured in a CUDA graph.
//
// Includes nothing: nvcc, NVRTC and, through the shim in tests/, a C++ compiler take it as it is.

#ifndef SHARED
#define SHARED(type, name) __shared__ type name
#endif

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// ------------------------------------------------------------------------------------------- what the host fills in

struct Request {
    u64 seed;
    u64 position;  // of the first proposed token in the sequence
    double top_p;  // 1: off
    float inverse_temperature;
    float min_p_distance;  // -inf: off
    float repetition_penalty, frequency_penalty, presence_penalty;
    int top_k;          // 0: off
    int greedy;         // temperature 0
    int rejection;      // judged by the rejection rule
    int deterministic;  // rejection rule: the proposal was not sampled
    int masked;         // the mask rows of this request count
    int rows;           // 1 + proposed nodes
    int first_edit, edits;
};

struct Edit {  // a column whose logit the processors change; ascending within a request
    int column;
    float bias;
    float count;  // how often the token was emitted
    int seen;     // it is in prompt or output
};

struct Summary {
    u64 mass;  // of the tokens that the filters leave; only where asked for
    float top, threshold;
    int best;
    int valid;  // 0: the largest logit is not finite, there is no choice
};

// ------------------------------------------------------------------------------------------------------- arithmetic

#define MASS_BITS 44
#define FLOAT_MAX 3.402823466e38f

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// exp(difference) in units of 2^-MASS_BITS, rounded down; difference <= 0.
__device__ __forceinline__ u64 mass(float difference) {
    float exponent = difference * 1.44269504f;
    if (!(exponent > -60.0f)) return 0;
    float whole = rintf(exponent);
    exponent = exponent - whole;
    float power = exponent * 0.00132546027f;
    power = (power + 0.00967199914f) * exponent;
    power = (power + 0.0555077940f) * exponent;
    power = (power + 0.240222320f) * exponent;
    power = (power + 0.693146944f) * exponent;
    power = power + 1.0f;
    return (u64)__int_as_float(__float_as_int(power) + (((int)whole + MASS_BITS) << 23));
}

__device__ __forceinline__ float twice_atanh(float s) {
    float square = s * s;
    float series = square * 0.296739578f;
    series = (series + 0.399867445f) * square;
    series = (series + 0.666666806f) * square;
    return (series + 2.0f) * s;
}

#define SQRT_HALF_BITS 0x3f3504f3
#define LN_2 0.693147182f

// x = mantissa * 2^exponent, mantissa in [sqrt(1/2), sqrt(2)).
__device__ __forceinline__ float split(float x, int& exponent) {
    int offset = __float_as_int(x) - SQRT_HALF_BITS;
    exponent = offset >> 23;
    return __int_as_float((offset & 0x7fffff) + SQRT_HALF_BITS);
}

__device__ __forceinline__ float log_of(float x) {
    int exponent;
    float mantissa = split(x, exponent);
    return twice_atanh((mantissa - 1.0f) / (mantissa + 1.0f)) + (float)exponent * LN_2;
}

__device__ __forceinline__ float gumbel(u32 word) {
    bool near_one = word >= 0xb504f334u;
    float distance = ((float)(near_one ? ~word : word) + 0.5f) * 2.3283064365386963e-10f;  // 2^-32
    int exponent;
    float mantissa = split(distance, exponent);
    float ratio = near_one ? distance / (2.0f - distance) : (1.0f - mantissa) / (mantissa + 1.0f);
    return -log_of(twice_atanh(ratio) - (near_one ? 0.0f : (float)exponent) * LN_2);
}

// Integers that order floats as their values do; -0 equals +0, NaN is above all.
__device__ __forceinline__ u32 order_of(float x) {
    if (x != x) return 0xffffffffu;
    u32 bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float float_of(u32 order) {
    return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

// The larger value, and of equal ones the lower index, is the larger integer.
__device__ __forceinline__ u64 pack(float value, int index) { return (u64)order_of(value) << 32 | (u32)~index; }
__device__ __forceinline__ float packed_value(u64 packed) { return float_of((u32)(packed >> 32)); }
__device__ __forceinline__ int packed_index(u64 packed) { return (int)~(u32)packed; }

// ------------------------------------------------------------------------------------------------------------ noise

#define STREAM 0x53504543ull
#define DRAFT_STREAM (STREAM + 1)
#define REJECTION_STREAM (STREAM + 2)
#define WORDS_PER_BLOCK 8

struct Words {
    u64 pairs[4];
    __device__ u32 operator[](int word) const { return (u32)(pairs[word >> 1] >> (32 * (word & 1))); }
};

// Philox4x64-10: the words of token ids 8 * block to 8 * block + 7.
__device__ __forceinline__ Words random_words(u64 seed, u64 position, u64 stream, u32 block) {
    u64 c0 = 1 + (u64)block, c1 = position, c2 = 0, c3 = stream, k0 = seed, k1 = 0;
    for (int round = 0; round < 10; round++) {
        const u64 m0 = 0xd2e7470ee14c6c93ull, m1 = 0xca5a826395121157ull;
        u64 high0 = __umul64hi(m0, c0), low0 = m0 * c0, high1 = __umul64hi(m1, c2), low1 = m1 * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9e3779b97f4a7c15ull;
        k1 += 0xbb67ae8584caa73bull;
    }
    return Words{{c0, c1, c2, c3}};
}

// ------------------------------------------------------------------------------------- what a block does as a whole

#define WARP 32
#define EVERY_LANE 0xffffffffu
#define MAX_WARPS 32

__device__ __forceinline__ int lane() { return threadIdx.x % WARP; }
__device__ __forceinline__ int warp() { return threadIdx.x / WARP; }
__device__ __forceinline__ int warps() { return blockDim.x / WARP; }

__device__ __forceinline__ u64 warp_sum(u64 value) {
    for (int step = WARP / 2; step; step /= 2) value += __shfl_xor_sync(EVERY_LANE, value, step);
    return value;
}
__device__ __forceinline__ u64 warp_max(u64 value) {
    for (int step = WARP / 2; step; step /= 2) {
        u64 other = __shfl_xor_sync(EVERY_LANE, value, step);
        value = other > value ? other : value;
    }
    return value;
}
__device__ __forceinline__ u64 warp_running_sum(u64 value) {  // own value included
    for (int step = 1; step < WARP; step *= 2) {
        u64 below = __shfl_up_sync(EVERY_LANE, value, step);
        if (lane() >= step) value += below;
    }
    return value;
}

// Every thread calls these; every thread gets the result. `partial`: MAX_WARPS shared integers.
__device__ __forceinline__ u64 block_sum(u64 value, u64* partial) {
    value = warp_sum(value);
    __syncthreads();
    if (lane() == 0) partial[warp()] = value;
    __syncthreads();
    return warp_sum(lane() < warps() ? partial[lane()] : 0);
}
__device__ __forceinline__ u64 block_max(u64 value, u64* partial) {
    value = warp_max(value);
    __syncthreads();
    if (lane() == 0) partial[warp()] = value;
    __syncthreads();
    return warp_max(lane() < warps() ? partial[lane()] : 0);
}

// How many positions a row's next token is from the first proposed one.
__device__ __forceinline__ int depth_of(const int* parents, int row) {
    int depth = 0;
    for (; row > 0; row = parents[row]) depth++;
    return depth;
}

// ---------------------------------------------------------------------------------------------------------- process

enum Type { FLOAT32, BFLOAT16, FLOAT16 };

template <Type type>
__device__ __forceinline__ float load(const void* logits, size_t at) {
    if (type == FLOAT32) return ((const float*)logits)[at];
    u32 bits = ((const u16*)logits)[at];
    if (type == BFLOAT16) return __uint_as_float(bits << 16);
    u32 sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    if (exponent) return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
    float tiny = (float)fraction * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -tiny : tiny;
}

__device__ __forceinline__ float penalize(float value, const Request& request, Edit edit) {
    value = value + edit.bias;
    if (edit.seen) value = value > 0.0f ? value / request.repetition_penalty : value * request.repetition_penalty;
    value = value - request.frequency_penalty * edit.count;
    return value - request.presence_penalty * (edit.count > 0.0f ? 1.0f : 0.0f);
}

// masks: one bit per token id, set where it may be chosen; mask_words per row.
__device__ __forceinline__ bool may_be_chosen(const u32* mask, int token) { return mask[token / 32] >> token % 32 & 1; }

template <Type type>
__device__ void process(const void* logits, int stride, float* values, const Request* requests, const int* tokens,
                        const int* parents, const Edit* edits, const u32* masks, int mask_words, const int* ids,
                        int rows_per_request, int columns) {
    int row = blockIdx.y, b = row / rows_per_request, r = row % rows_per_request;
    const Request request = requests[b];
    if (r >= request.rows) return;
    tokens += b * rows_per_request;
    parents += b * rows_per_request;
    size_t from = (size_t)row * stride, to = (size_t)row * columns;
    const u32* mask = request.masked ? masks + (size_t)row * mask_words : nullptr;
    int length = (columns + gridDim.x - 1) / gridDim.x, first = blockIdx.x * length;
    int end = first + length < columns ? first + length : columns;
    for (int i = first + threadIdx.x; i < end; i += blockDim.x) {
        float value = load<type>(logits, from + i);
        if (mask && !may_be_chosen(mask, ids ? ids[i] : i)) value = -infinity();
        values[to + i] = value;
    }
    __syncthreads();  // the edits write over what other threads wrote
    for (int e = request.first_edit + threadIdx.x; e < request.first_edit + request.edits; e += blockDim.x) {
        Edit edit = edits[e];
        if (edit.column < first || edit.column >= end) continue;
        int token = ids ? ids[edit.column] : edit.column;
        if (mask && !may_be_chosen(mask, token)) continue;
        for (int node = r; node > 0; node = parents[node])
            if (tokens[node] == token) {
                edit.count = edit.count + 1.0f;
                edit.seen = 1;
            }
        values[to + edit.column] = penalize(load<type>(logits, from + edit.column), request, edit);
    }
}

// -------------------------------------------------------------------------------------------------------- summarize

#define BINS 2048  // a digit of 11 bits

struct SummarizeMemory {
    u64 partial[MAX_WARPS];
    u32 low[BINS], high[BINS];  // a 64-bit sum each; two 32-bit atomics are native in shared memory, one of 64 is not
    u64 above;
    int bin;
};

__device__ __forceinline__ void add_to_bin(SummarizeMemory& memory, int bin, u64 value) {
    u32 low = (u32)value, high = (u32)(value >> 32);
    if (low && atomicAdd(&memory.low[bin], low) + low < low) high++;  // the low half ran over
    if (high) atomicAdd(&memory.high[bin], high);
}

__device__ __forceinline__ u64 bin_sum(const SummarizeMemory& memory, int bin) {
    return bin < BINS ? (u64)memory.high[bin] << 32 | memory.low[bin] : 0;
}

// The first bin with which the running sum of bins reaches `needed`; `above` grows by the bins before it.
__device__ int find_bin(SummarizeMemory& memory, u64 needed, u64& above) {
    int per_thread = (BINS + blockDim.x - 1) / blockDim.x, first = threadIdx.x * per_thread;
    u64 own = 0;
    for (int i = 0; i < per_thread; i++) own += bin_sum(memory, first + i);
    u64 reached = warp_running_sum(own);
    __syncthreads();
    if (lane() == WARP - 1) memory.partial[warp()] = reached;
    __syncthreads();
    for (int before = 0; before < warp(); before++) reached += memory.partial[before];
    reached += above;
    u64 sum = reached - own;
    if (sum < needed && reached >= needed) {  // true for one thread
        int bin = first;
        while (sum + bin_sum(memory, bin) < needed) sum += bin_sum(memory, bin++);
        memory.bin = bin;
        memory.above = sum;
    }
    __syncthreads();
    above = memory.above;
    return memory.bin;
}

// The smallest value of the smallest set of largest values, all at least `threshold`, that counts `count` tokens or,
// if count is 0, holds `share` of their mass. `threshold` itself where there is not that much. A radix selection: the
// values' order integers, 11, 11 and 10 bits at a time, the largest first.
__device__ float select(SummarizeMemory& memory, const float* values, int columns, float top, float inverse_temperature,
                        float threshold, int count, double share) {
    u64 above = 0, needed = 0;
    u32 prefix = 0;
    for (int shift = 21, width = 11; shift >= 0; shift -= width) {
        for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) memory.low[bin] = memory.high[bin] = 0;
        __syncthreads();
        u64 total = 0;
        for (int i = threadIdx.x; i < columns; i += blockDim.x) {
            float value = values[i];
            u32 order = order_of(value);
            if (!(value >= threshold) || (u64)order >> (shift + width) != prefix) continue;
            u64 weight = count ? 1 : mass((value - top) * inverse_temperature);
            total += weight;
            add_to_bin(memory, ((1 << width) - 1) - (order >> shift & ((1 << width) - 1)), weight);
        }
        total = block_sum(total, memory.partial);  // its barriers end the histogram, too
        if (shift == 21) {
            needed = count ? (u64)count : (u64)ceil(share * (double)total);
            needed = needed ? needed : 1;
            if (total < needed) return threshold;
        }
        int bin = find_bin(memory, needed, above);
        prefix = prefix << width | (u32)(((1 << width) - 1) - bin);
        if (shift == 10) width = 10;
        __syncthreads();
    }
    return float_of(prefix);
}

extern "C" __global__ void __launch_bounds__(1024)
    summarize(const float* values, Summary* summaries, const Request* requests, int rows_per_request, int columns,
              int with_mass) {
    SHARED(SummarizeMemory, memory);
    int row = blockIdx.x, b = row / rows_per_request;
    const Request request = requests[b];
    if (row % rows_per_request >= request.rows) return;
    values += (size_t)row * columns;
    u64 best = 0;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        u64 packed = pack(values[i], i);
        best = packed > best ? packed : best;
    }
    best = block_max(best, memory.partial);
    float top = packed_value(best), threshold = -FLOAT_MAX;
    int valid = best >> 32 != 0xffffffffu && top - top == 0.0f;
    u64 total = 0;
    if (valid && !request.greedy) {
        if (request.top_k > 0 && request.top_k < columns)
            threshold = select(memory, values, columns, top, request.inverse_temperature, threshold, request.top_k, 0);
        if (request.top_p < 1)
            threshold = select(memory, values, columns, top, request.inverse_temperature, threshold, 0, request.top_p);
        float nearest = top + request.min_p_distance;
        threshold = nearest > threshold ? nearest : threshold;
        if (with_mass) {
            for (int i = threadIdx.x; i < columns; i += blockDim.x)
                if (values[i] >= threshold) total += mass((values[i] - top) * request.inverse_temperature);
            total = block_sum(total, memory.partial);
        }
    }
    if (threadIdx.x == 0) {
        summaries[row].mass = total;
        summaries[row].top = valid ? top : 0.0f;
        summaries[row].threshold = threshold;
        summaries[row].best = packed_index(best);
        summaries[row].valid = valid;
    }
}

// -------------------------------------------------------------------------------------------------- add_noise, best

// drafting: the values are a draft's, whose tokens the rejection rule wants drawn with noise of their own.
extern "C" __global__ void __launch_bounds__(1024)
    add_noise(float* values, const Summary* summaries, const Request* requests, const int* parents, const int* ids,
              int rows_per_request, int columns, int drafting) {
    int row = blockIdx.y, b = row / rows_per_request, r = row % rows_per_request;
    const Request request = requests[b];
    if (r >= request.rows || request.greedy || (request.rejection && !drafting)) return;
    const Summary summary = summaries[row];
    if (!summary.valid) return;
    values += (size_t)row * columns;
    u64 position = request.position + depth_of(parents + b * rows_per_request, r);
    u64 stream = request.rejection ? DRAFT_STREAM : STREAM;
    int blocks = (columns + WORDS_PER_BLOCK - 1) / WORDS_PER_BLOCK;
    for (int block = blockIdx.x * blockDim.x + threadIdx.x; block < blocks; block += gridDim.x * blockDim.x) {
        Words words;
        int drawn = -1;  // which words these are
        for (int i = block * WORDS_PER_BLOCK; i < (block + 1) * WORDS_PER_BLOCK && i < columns; i++) {
            float value = values[i];
            if (!(value >= summary.threshold)) {
                values[i] = -infinity();
                continue;
            }
            int token = ids ? ids[i] : i;
            if (drawn != token / WORDS_PER_BLOCK) {
                drawn = token / WORDS_PER_BLOCK;
                words = random_words(request.seed, position, stream, drawn);
            }
            values[i] = (value - summary.top) * request.inverse_temperature + gumbel(words[token % WORDS_PER_BLOCK]);
        }
    }
}

// The `count` best tokens of each row, best first, -1 where there are fewer, and their values. masses (may be null):
// of the whole row, the best one's being 2^MASS_BITS, so that share i is exp(best_values[i] - best_values[0]) / mass.
extern "C" __global__ void __launch_bounds__(1024)
    best(const float* values, const Summary* summaries, const Request* requests, const int* ids, int rows_per_request,
         int columns, int count, int* best_tokens, float* best_values, u64* masses) {
    SHARED(SummarizeMemory, memory);
    int row = blockIdx.x;
    if (row % rows_per_request >= requests[row / rows_per_request].rows) return;
    values += (size_t)row * columns;
    best_tokens += (size_t)row * count;
    best_values += (size_t)row * count;
    int valid = summaries[row].valid;
    u64 previous = ~0ull;
    float top = 0.0f;
    for (int place = 0; place < count; place++) {
        u64 found = 0;
        if (valid)
            for (int i = threadIdx.x; i < columns; i += blockDim.x) {
                u64 packed = pack(values[i], i);
                if (packed < previous && packed > found) found = packed;
            }
        previous = block_max(found, memory.partial);
        float value = packed_value(previous);
        bool there = valid && previous && value >= -FLOAT_MAX;
        if (place == 0) top = value;
        if (threadIdx.x == 0) {
            best_tokens[place] = there ? (ids ? ids[packed_index(previous)] : packed_index(previous)) : -1;
            best_values[place] = there ? value : -infinity();
        }
    }
    if (!masses) return;
    u64 total = 0;
    if (valid)
        for (int i = threadIdx.x; i < columns; i += blockDim.x) total += mass(values[i] - top);
    total = block_sum(total, memory.partial);
    if (threadIdx.x == 0) masses[row] = total;
}

// ------------------------------------------------------------------------------------------------------ the verdict

// verdict, for each request 1 + rows_per_request numbers: accepted nodes, next token, and the rows of the accepted
// path. A next token of -1: the row that was reached has no choice.
extern "C" __global__ void walk(const int* choices, const Request* requests, const int* tokens, const int* parents,
                                int rows_per_request, int* verdict) {
    int b = blockIdx.x;
    const Request request = requests[b];
    if (request.rejection) return;
    tokens += b * rows_per_request;
    parents += b * rows_per_request;
    choices += b * rows_per_request;
    verdict += b * (1 + rows_per_request);
    int row = 0, accepted = 0;
    for (;;) {
        int choice = choices[row];
        int child = 0;
        for (int first = 1; first < request.rows && !child; first += WARP) {
            int candidate = first + lane();
            bool hit = candidate < request.rows && parents[candidate] == row && tokens[candidate] == choice;
            u32 hits = __ballot_sync(EVERY_LANE, hit);
            if (hits) child = first + __ffs(hits) - 1;
        }
        if (!child) {
            if (lane() == 0) {
                verdict[0] = accepted;
                verdict[1] = choice;
            }
            return;
        }
        if (lane() == 0) verdict[2 + accepted] = child;
        accepted++;
        row = child;
    }
}

// -------------------------------------------------------------------------------------------------------- rejection

__device__ __forceinline__ float probability(float value, const Summary& summary, const Request& request) {
    if (!(value >= summary.threshold)) return 0.0f;
    return (float)mass((value - summary.top) * request.inverse_temperature) * (float)(1.0 / (double)summary.mass);
}

// The distribution of each row of a draft, after summarize with mass: float32 [rows, vocabulary], vocabulary > every
// id. Columns that the draft does not know are left alone: they are zero from the start.
extern "C" __global__ void __launch_bounds__(1024)
    probabilities(const float* values, const Summary* summaries, const Request* requests, const int* ids,
                  int rows_per_request, int columns, int vocabulary, float* probs) {
    int row = blockIdx.y;
    const Request request = requests[row / rows_per_request];
    if (row % rows_per_request >= request.rows || !summaries[row].valid) return;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < columns; i += gridDim.x * blockDim.x)
        probs[(size_t)row * vocabulary + (ids ? ids[i] : i)] =
            probability(values[(size_t)row * columns + i], summaries[row], request);
}

struct RejectMemory {
    u64 partial[MAX_WARPS];
    int row;
    int token;
};

struct Residual {  // what the token that replaces a rejected one is drawn from, or the bonus token
    const float* values;
    const float* draft_probs;  // null: deterministic
    int draft_token;           // -1: nothing is subtracted
    Summary summary;

    __device__ u64 operator()(int i, const Request& request) const {
        float value = values[i];
        if (draft_token < 0) {
            return value >= summary.threshold ? mass((value - summary.top) * request.inverse_temperature) : 0;
        }
        float left = probability(value, summary, request) - (draft_probs ? draft_probs[i] : i == draft_token ? 1.0f : 0.0f);
        return (u64)((left > 0.0f ? left : 0.0f) * 17592186044416.0f);  // 2^MASS_BITS
    }
};

// The token that a point of the summed mass falls on; the same for every thread.
__device__ int draw(RejectMemory& memory, const Residual& residual, const Request& request, int columns, u64 random) {
    // Each warp sums a stretch of the columns; the warp on whose stretch the point falls looks through it.
    int length = (columns + warps() - 1) / warps(), first = warp() * length;
    int end = first + length < columns ? first + length : columns;
    u64 sum = 0;
    for (int i = first + lane(); i < end; i += WARP) sum += residual(i, request);
    sum = warp_sum(sum);
    __syncthreads();
    if (lane() == 0) memory.partial[warp()] = sum;
    if (threadIdx.x == 0) memory.token = -1;
    __syncthreads();
    u64 before = 0, total = 0;
    for (int other = 0; other < warps(); other++) {
        if (other < warp()) before += memory.partial[other];
        total += memory.partial[other];
    }
    u64 point = __umul64hi(random, total);
    if (total && before <= point && point < before + sum)
        for (int start = first; start < end; start += WARP) {
            u64 reached = before + warp_running_sum(start + lane() < end ? residual(start + lane(), request) : 0);
            u32 beyond = __ballot_sync(EVERY_LANE, reached > point);
            if (beyond) {
                if (lane() == 0) memory.token = start + __ffs(beyond) - 1;
                break;
            }
            before = __shfl_sync(EVERY_LANE, reached, WARP - 1);
        }
    __syncthreads();
    return memory.token;
}

// Chains. draft_probs float32 [requests, rows_per_request - 1, columns]: what each proposed token was drawn from.
// verdict as for walk.
extern "C" __global__ void __launch_bounds__(1024)
    reject(const float* values, const Summary* summaries, const Request* requests, const int* tokens,
           const float* draft_probs, int rows_per_request, int columns, int* verdict) {
    SHARED(RejectMemory, memory);
    int b = blockIdx.x;
    const Request request = requests[b];
    if (!request.rejection) return;
    tokens += b * rows_per_request;
    verdict += b * (1 + rows_per_request);
    values += (size_t)b * rows_per_request * columns;
    summaries += b * rows_per_request;
    draft_probs += (size_t)b * (rows_per_request - 1) * columns;
    if (threadIdx.x == 0) {
        int row = 0;
        for (; row + 1 < request.rows && summaries[row].valid; row++) {
            int token = tokens[row + 1];
            Words words = random_words(request.seed, request.position + row, REJECTION_STREAM, 0);
            double accepting = (double)(words.pairs[0] >> 11) * 1.1102230246251565e-16;  // 2^-53
            if (token >= columns) break;  // a lookup may copy a padding id from the prompt
            float draft_prob = request.deterministic ? 1.0f : draft_probs[(size_t)row * columns + token];
            float target_prob = probability(values[(size_t)row * columns + token], summaries[row], request);
            if (!(accepting * (double)draft_prob < (double)target_prob)) break;
        }
        memory.row = row;
    }
    __syncthreads();
    int row = memory.row, token = -1;
    if (summaries[row].valid) {
        u64 random = random_words(request.seed, request.position + row, REJECTION_STREAM, 0).pairs[1];
        bool rejected = row + 1 < request.rows;
        Residual residual = {values + (size_t)row * columns,
                             request.deterministic || !rejected ? nullptr : draft_probs + (size_t)row * columns,
                             rejected ? tokens[row + 1] : -1, summaries[row]};
        token = draw(memory, residual, request, columns, random);
        if (token < 0) {  // nothing was left but rounding
            residual.draft_token = -1;
            token = draw(memory, residual, request, columns, random);
        }
    }
    if (threadIdx.x == 0) {
        verdict[0] = row;
        verdict[1] = token;
        for (int accepted = 0; accepted < row; accepted++) verdict[2 + accepted] = accepted + 1;
    }
}

#define PROCESS(name, type)                                                                                             \
    extern "C" __global__ void __launch_bounds__(1024) name(                                                            \
        const void* logits, int stride, float* values, const Request* requests, const int* tokens, const int* parents,  \
        const Edit* edits, const u32* masks, int mask_words, const int* ids, int rows_per_request, int columns) {       \
        process<type>(logits, stride, values, requests, tokens, parents, edits, masks, mask_words, ids,                 \
                      rows_per_request, columns);                                                                       \
    }
PROCESS(process_float32, FLOAT32)
PROCESS(process_bfloat16, BFLOAT16)
PROCESS(process_float16, FLOAT16)

// ---------------------------------------------------------------------------------------------------------- commit

// Moves rows `start + sources[i]`, ascending, to `start + i`, in every part [heads, rows, words] of a KV cache. A thread
// moves its words of all rows one after the other, and no row moves backwards, so nothing is overwritten before it is
// read. grid (parts, heads)
extern "C" __global__ void gather_rows(u32* const* parts, const int* sources, int count, int start, int rows, int words) {
    u32* part = parts[blockIdx.x] + ((u64)blockIdx.y * rows + start) * words;
    for (int word = threadIdx.x; word < words; word += blockDim.x)
        for (int row = 0; row < count; row++) part[(u64)row * words + word] = part[(u64)sources[row] * words + word];
}
