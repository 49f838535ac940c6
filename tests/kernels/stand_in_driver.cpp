// A stand-in for the CUDA driver (libcuda.so.1), for tests: device memory is the heap's, streams are done at once, and
// kernels are those of engines/accept.cu, compiled into this library and run by the shim. It has what cuda.core asks for
// on the paths that the product takes; anything else is reported as missing.
#include "shim.h"

#include "../../engines/accept.cu"

#include <dlfcn.h>

#include <map>
#include <string>
#include <tuple>
#include <utility>

typedef int CUresult;
enum { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_INVALID_IMAGE = 200, CUDA_ERROR_NOT_FOUND = 500, CUDA_ERROR_LAUNCH_FAILED = 719 };

// A kernel that takes its arguments as the driver does: an array of pointers to them.
using Kernel = std::function<void(void**)>;
template <class... Arguments, size_t... Index>
Kernel unpacked(void (*kernel)(Arguments...), std::index_sequence<Index...>) {
    return [kernel](void** at) { kernel(*(std::decay_t<Arguments>*)at[Index]...); };
}
template <class... Arguments>
std::pair<Kernel, std::vector<size_t>> kernel_of(void (*kernel)(Arguments...)) {
    return {unpacked(kernel, std::index_sequence_for<Arguments...>{}), {sizeof(Arguments)...}};
}

#define KERNEL(name) {#name, kernel_of(name)}
static std::map<std::string, std::pair<Kernel, std::vector<size_t>>> kernels = {
    KERNEL(process_float32), KERNEL(process_bfloat16), KERNEL(process_float16), KERNEL(summarize), KERNEL(add_noise),
    KERNEL(best),            KERNEL(walk),             KERNEL(probabilities),   KERNEL(reject),
    KERNEL(gather_rows)};

// What a handle points to.
struct Function {
    std::string name;
    Kernel run;
    std::vector<size_t> sizes;  // of the arguments
};
static std::map<std::string, Function> functions;
static int context, pool, library, stream;  // their addresses are handles
static void* current;
using Graph = std::vector<std::function<void()>>;
static Graph graph;  // the one that is being captured, or was last
static bool capturing = false, failing = false;

extern "C" {

CUresult cuGetErrorName(CUresult, const char** text) {
    *text = "STAND_IN_DRIVER_ERROR";
    return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) {
    *text = "an error of the stand-in driver";
    return CUDA_SUCCESS;
}
CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) {
    *version = 13090;
    return CUDA_SUCCESS;
}

// One device: an SM 8.9.
CUresult cuDeviceGetCount(int* count) {
    *count = 1;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGet(int* device, int) {
    *device = 0;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, int attribute, int) {
    enum { MAJOR = 75, MINOR = 76, MEMORY_POOLS = 115 };
    *value = attribute == MAJOR ? 8 : attribute == MINOR ? 9 : attribute == MEMORY_POOLS ? 1 : 0;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(void** handle, int) {
    *handle = &context;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease(int) { return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(void* handle) {
    current = handle;
    return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(void** handle) {
    *handle = current;
    return CUDA_SUCCESS;
}

// Streams: everything is done before the call returns.
CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    *least = *greatest = 0;
    return CUDA_SUCCESS;
}
CUresult cuStreamCreateWithPriority(void** handle, unsigned, int) {
    *handle = &stream;
    return CUDA_SUCCESS;
}
CUresult cuStreamDestroy(void*) { return CUDA_SUCCESS; }
CUresult cuStreamSynchronize(void*) { return capturing ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(void*, int* status) {
    *status = capturing;
    return CUDA_SUCCESS;
}

// Graphs: while a stream is captured its launches are only written down. Anything else is refused then.
CUresult cuStreamBeginCapture(void*, int) {
    if (capturing) return CUDA_ERROR_INVALID_VALUE;
    capturing = true;
    graph.clear();
    return CUDA_SUCCESS;
}
CUresult cuStreamEndCapture(void*, void** handle) {
    capturing = false;
    *handle = &graph;
    return CUDA_SUCCESS;
}
CUresult cuStreamGetCaptureInfo(void*, int* status, uint64_t* id, void** handle, const void** nodes, void** edges,
                                size_t* count) {
    *status = capturing;
    if (id) *id = 1;
    if (handle) *handle = &graph;
    if (nodes) *nodes = nullptr;
    if (edges) *edges = nullptr;
    if (count) *count = 0;
    return CUDA_SUCCESS;
}
CUresult cuGraphInstantiateWithFlags(void** executable, void*, uint64_t) {
    *executable = new Graph(graph);
    return CUDA_SUCCESS;
}
struct InstantiateParameters {
    uint64_t flags;
    void* upload_stream;
    void* error_node;
    int result;
};
CUresult cuGraphInstantiateWithParams(void** executable, void*, InstantiateParameters* parameters) {
    parameters->result = 0;
    return cuGraphInstantiateWithFlags(executable, nullptr, parameters->flags);
}
CUresult cuGraphLaunch(void* executable, void*) {
    for (const std::function<void()>& launch : *(Graph*)executable) launch();
    return CUDA_SUCCESS;
}
CUresult cuGraphExecDestroy(void* executable) {
    delete (Graph*)executable;
    return CUDA_SUCCESS;
}
CUresult cuGraphDestroy(void*) { return CUDA_SUCCESS; }
CUresult cuUserObjectCreate(void** object, void*, void (*)(void*), unsigned, unsigned) {
    *object = &graph;
    return CUDA_SUCCESS;
}
CUresult cuGraphRetainUserObject(void*, void*, unsigned, unsigned) { return CUDA_SUCCESS; }
CUresult cuGraphReleaseUserObject(void*, void*, unsigned) { return CUDA_SUCCESS; }

// Memory. Rubbish in what is new, as on a device.
static CUresult allocate(void** memory, size_t size) {
    if (capturing) return CUDA_ERROR_INVALID_VALUE;
    *memory = malloc(size ? size : 1);
    memset(*memory, 0xab, size);
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetMemPool(void** handle, int) {
    *handle = &pool;
    return CUDA_SUCCESS;
}
CUresult cuMemPoolGetAttribute(void*, int, void* value) {
    *(uint64_t*)value = 0;
    return CUDA_SUCCESS;
}
CUresult cuMemPoolSetAttribute(void*, int, void*) { return CUDA_SUCCESS; }
CUresult cuMemAllocFromPoolAsync(void** memory, size_t size, void*, void*) { return allocate(memory, size); }
CUresult cuMemFreeAsync(void* memory, void*) {
    free(memory);
    return CUDA_SUCCESS;
}
CUresult cuMemAllocHost(void** memory, size_t size) { return allocate(memory, size); }
CUresult cuMemFreeHost(void* memory) { return cuMemFreeAsync(memory, nullptr); }
CUresult cuMemcpyAsync(void* to, const void* from, size_t size, void*) {
    if (capturing) return CUDA_ERROR_INVALID_VALUE;
    memcpy(to, from, size);
    return CUDA_SUCCESS;
}
CUresult cuMemsetD8Async(void* to, unsigned char value, size_t size, void*) {
    if (capturing) return CUDA_ERROR_INVALID_VALUE;
    memset(to, value, size);
    return CUDA_SUCCESS;
}

// Kernels. The image must be machine code for a GPU, which is not looked into.
CUresult cuLibraryLoadData(void** handle, const void* image, void*, void**, unsigned, void*, void**, unsigned) {
    if (memcmp(image, "\x7f" "ELF", 4)) return CUDA_ERROR_INVALID_IMAGE;
    *handle = &library;
    return CUDA_SUCCESS;
}
CUresult cuLibraryGetKernel(void** handle, void*, const char* name) {
    auto found = kernels.find(name);
    if (found == kernels.end()) return CUDA_ERROR_NOT_FOUND;
    functions[name] = Function{name, found->second.first, found->second.second};
    *handle = &functions[name];
    return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned dynamic_shared, void*, void** arguments, void**) {
    if (grid_z != 1 || block_y != 1 || block_z != 1 || block_x % 32 || block_x > 1024 || dynamic_shared)
        return CUDA_ERROR_INVALID_VALUE;
    if (failing) {
        failing = false;
        return CUDA_ERROR_LAUNCH_FAILED;
    }
    const Function& called = *(Function*)function;
    if (!capturing) {
        shim::launch(shim::Dim3{grid_x, grid_y, 1}, block_x, [&] { called.run(arguments); });
        return CUDA_SUCCESS;
    }
    std::vector<uint64_t> values(called.sizes.size());
    for (size_t i = 0; i < values.size(); i++) memcpy(&values[i], arguments[i], called.sizes[i]);
    graph.push_back([=, &called]() mutable {
        std::vector<void*> at;
        for (uint64_t& value : values) at.push_back(&value);
        shim::launch(shim::Dim3{grid_x, grid_y, 1}, block_x, [&] { called.run(at.data()); });
    });
    return CUDA_SUCCESS;
}
struct LaunchConfig {
    unsigned grid[3], block[3], dynamic_shared;
    void* stream;
    void* attributes;
    unsigned attribute_count;
};
CUresult cuLaunchKernelEx(const LaunchConfig* config, void* function, void** arguments, void** extra) {
    if (config->attribute_count) return CUDA_ERROR_INVALID_VALUE;
    return cuLaunchKernel(function, config->grid[0], config->grid[1], config->grid[2], config->block[0],
                          config->block[1], config->block[2], config->dynamic_shared, config->stream, arguments, extra);
}

// What a library that is not ours would queue on the stream: run, or written down while a stream is captured.
void stand_in_enqueue(void (*call)(void)) {
    if (capturing)
        graph.push_back(call);
    else
        call();
}
int stand_in_capturing(void) { return capturing; }
// The next launch of a kernel fails.
void stand_in_fail(void) { failing = true; }

// The next launches run their threads in another order.
void stand_in_seed(uint64_t seed) { shim::seed = seed; }

// Functions are asked for by name; what is not here is not found.
CUresult cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int* status) {
    static void* self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    *function = dlsym(self, name);
    if (status) *status = *function ? 0 : 1;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
}
