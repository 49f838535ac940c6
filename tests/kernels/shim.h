// CUDA kernels on a CPU, for tests: include this, then the kernels' source, then run them with shim::launch.
//
// Two ways to run a block's threads. By default each is a fiber of one OS thread that runs until it meets a barrier or
// a warp function; the order in which fibers get their turn is shuffled by shim::seed. A block in which some threads
// wait at a barrier while others have gone elsewhere is reported, and shared memory is filled with rubbish before each
// block. With SHIM_THREADS each is an OS thread, for the thread sanitizer; SHIM_NO_BARRIERS and SHIM_PLAIN_ATOMICS break
// the kernels then, to see that it notices.
//
// Not tested by either: divergence inside a warp, the memory order between blocks, speed.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>
#ifdef SHIM_THREADS
#include <pthread.h>
#include <thread>
#endif

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define SHARED(type, name) type& name = *(type*)shim::shared_memory(sizeof(type))

namespace shim {

struct Dim3 {
    unsigned x = 1, y = 1, z = 1;
};
inline Dim3 grid_size, block_size, block_index;
inline uint64_t seed = 0;

constexpr size_t SHARED_BYTES = 48 << 10;  // what every architecture gives a block without asking
alignas(256) inline char shared_bytes[SHARED_BYTES];

inline void* shared_memory(size_t size) {
    if (size > SHARED_BYTES) {
        fprintf(stderr, "shim: %zu bytes of shared memory, there are %zu\n", size, SHARED_BYTES);
        abort();
    }
    return shared_bytes;
}

// What the lanes of a warp tell each other. Two turns: a lane may begin the next exchange while others still read.
struct Exchange {
    uint64_t said[2][32];
};

#ifndef SHIM_THREADS

enum State { READY, AT_BARRIER, AT_EXCHANGE, DONE };
struct Fiber {
    void* stack_pointer;
    State state;
    unsigned thread, exchanges;
};
inline void* scheduler;
inline Fiber* current;
inline std::vector<Fiber> fibers;
inline std::vector<Exchange> warps;
inline const std::function<void()>* body;

// Saves the registers that a call must preserve on the present stack and goes on with another one.
extern "C" void shim_switch(void** save, void* load);
#if defined(__x86_64__)
asm(R"(
.text
.type shim_switch, @function
shim_switch:
    push %rbx
    push %rbp
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbp
    pop %rbx
    ret
)");
constexpr int SAVED_REGISTERS = 6;
#else
#error "shim_switch is not written for this processor"
#endif

inline void pause(State state) {
    Fiber* fiber = current;
    fiber->state = state;
    shim_switch(&fiber->stack_pointer, scheduler);
}
inline void fiber_main() {
    (*body)();
    pause(DONE);
    abort();
}
inline unsigned thread() { return current->thread; }
inline void barrier() { pause(AT_BARRIER); }
inline const uint64_t* exchange(uint64_t value) {
    Fiber* fiber = current;
    uint64_t* said = warps[fiber->thread / 32].said[fiber->exchanges++ % 2];
    said[fiber->thread % 32] = value;
    pause(AT_EXCHANGE);
    return said;
}

inline void start(Fiber& fiber, unsigned thread, char* stack_end) {
    fiber.state = READY;
    fiber.thread = thread;
    fiber.exchanges = 0;
    // As if called: the stack is 8 bytes off a multiple of 16 at a function's first instruction.
    void** top = (void**)((uintptr_t)stack_end & ~(uintptr_t)63) - 2;
    *top = (void*)fiber_main;
    fiber.stack_pointer = top - SAVED_REGISTERS;
}

inline void run_block(unsigned threads, std::vector<unsigned>& order, uint64_t& random) {
    for (;;) {
        if (seed)
            for (unsigned i = threads; i > 1; i--) {
                random ^= random << 13, random ^= random >> 7, random ^= random << 17;
                std::swap(order[i - 1], order[random % i]);
            }
        bool progress = false;
        for (unsigned i : order)
            if (fibers[i].state == READY) {
                progress = true;
                current = &fibers[i];
                shim_switch(&scheduler, current->stack_pointer);
            }
        for (unsigned first = 0; first < threads; first += 32) {
            bool all = true;
            for (unsigned i = first; i < first + 32; i++) all &= fibers[i].state == AT_EXCHANGE;
            if (all) {
                progress = true;
                for (unsigned i = first; i < first + 32; i++) fibers[i].state = READY;
            }
        }
        unsigned done = 0, waiting = 0;
        for (Fiber& fiber : fibers) done += fiber.state == DONE, waiting += fiber.state == AT_BARRIER;
        if (done == threads) return;
        if (done + waiting == threads) {
            progress = true;
            for (Fiber& fiber : fibers)
                if (fiber.state == AT_BARRIER) fiber.state = READY;
        }
        if (!progress) {
            fprintf(stderr, "shim: block (%u, %u): %u threads wait at a barrier, %u have ended, %u are elsewhere\n",
                    block_index.x, block_index.y, waiting, done, threads - waiting - done);
            abort();
        }
    }
}

inline void launch(Dim3 grid, unsigned threads, const std::function<void()>& kernel) {
    constexpr size_t STACK = 32 << 10;
    static std::vector<char> stacks;
    if (stacks.size() < threads * STACK) stacks.resize(threads * STACK);
    std::vector<unsigned> order(threads);
    uint64_t random = seed ? seed : 1;
    body = &kernel;
    grid_size = grid;
    block_size = Dim3{threads, 1, 1};
    fibers.resize(threads);
    warps.resize((threads + 31) / 32);
    for (unsigned y = 0; y < grid.y; y++)
        for (unsigned x = 0; x < grid.x; x++) {
            block_index = Dim3{x, y, 0};
            memset(shared_bytes, 0xcd, SHARED_BYTES);
            for (unsigned i = 0; i < threads; i++) {
                start(fibers[i], i, stacks.data() + (i + 1) * STACK);
                order[i] = i;
            }
            run_block(threads, order, random);
        }
}

#else

inline pthread_barrier_t block_barrier, warp_barriers[32];
inline Exchange warps[32];
inline thread_local unsigned thread_index, exchanges;

inline unsigned thread() { return thread_index; }
inline void barrier() {
#ifndef SHIM_NO_BARRIERS
    pthread_barrier_wait(&block_barrier);
#endif
}
inline const uint64_t* exchange(uint64_t value) {
    unsigned warp = thread_index / 32;
    uint64_t* said = warps[warp].said[exchanges++ % 2];
    said[thread_index % 32] = value;
    pthread_barrier_wait(&warp_barriers[warp]);
    return said;
}

inline void launch(Dim3 grid, unsigned threads, const std::function<void()>& kernel) {
    grid_size = grid;
    block_size = Dim3{threads, 1, 1};
    pthread_barrier_init(&block_barrier, nullptr, threads);
    for (unsigned warp = 0; warp < threads / 32; warp++) pthread_barrier_init(&warp_barriers[warp], nullptr, 32);
    for (unsigned y = 0; y < grid.y; y++)
        for (unsigned x = 0; x < grid.x; x++) {
            block_index = Dim3{x, y, 0};
            memset(shared_bytes, 0xcd, SHARED_BYTES);
            std::vector<std::thread> running;
            for (unsigned i = 0; i < threads; i++)
                running.emplace_back([i, &kernel] {
                    thread_index = i;
                    exchanges = 0;
                    kernel();
                });
            for (std::thread& each : running) each.join();
        }
}

#endif

template <class T>
uint64_t to_bits(T value) {
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}
template <class T>
T from_bits(uint64_t bits) {
    T value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
inline unsigned lane() { return thread() % 32; }

}  // namespace shim

#define threadIdx (shim::Dim3{shim::thread(), 0, 0})
#define blockIdx shim::block_index
#define blockDim shim::block_size
#define gridDim shim::grid_size

inline void __syncthreads() { shim::barrier(); }
template <class T>
T __shfl_xor_sync(unsigned, T value, int step) {
    unsigned lane = shim::lane();
    return shim::from_bits<T>(shim::exchange(shim::to_bits(value))[lane ^ step]);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int step) {
    unsigned lane = shim::lane();
    return shim::from_bits<T>(shim::exchange(shim::to_bits(value))[lane >= (unsigned)step ? lane - step : lane]);
}
template <class T>
T __shfl_sync(unsigned, T value, int from) {
    return shim::from_bits<T>(shim::exchange(shim::to_bits(value))[from]);
}
inline unsigned __ballot_sync(unsigned, bool vote) {
    const uint64_t* votes = shim::exchange(vote);
    unsigned bits = 0;
    for (int i = 0; i < 32; i++) bits |= (unsigned)votes[i] << i;
    return bits;
}
inline unsigned atomicAdd(unsigned* at, unsigned value) {
#ifdef SHIM_PLAIN_ATOMICS
    unsigned before = *at;
    *at = before + value;
    return before;
#else
    return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
#endif
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline int __ffs(unsigned bits) { return __builtin_ffs((int)bits); }
inline float __uint_as_float(unsigned bits) { return shim::from_bits<float>(bits); }
inline float __int_as_float(int bits) { return shim::from_bits<float>((unsigned)bits); }
inline unsigned __float_as_uint(float value) { return (unsigned)shim::to_bits(value); }
inline int __float_as_int(float value) { return (int)shim::to_bits(value); }
