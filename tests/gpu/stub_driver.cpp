// A libcuda.so.1 of host memory, on which the real cuda.bindings and cuda.core run: memory is the host's, streams are done
// at once, kernels are noted (one line per launch in the file STUB_LAUNCHES) and not run. What needs a current context
// fails without one, as in the driver. test_plumbing.py runs the cuda backend on it.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

typedef int Status;
typedef void* Handle;
typedef unsigned long long Pointer;

static const Handle PRIMARY = (Handle)0x1111000, LEGACY = (Handle)1;
enum { OK = 0, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, ILLEGAL_STATE = 401, NOT_FOUND = 500,
       CAPTURE_UNSUPPORTED = 900 };
enum { KERNEL = 0, MEMCPY = 1, MEMSET = 2, NOT_CAPTURING = -1 };

struct Stream { unsigned flags = 0; bool capturing = false; std::vector<int> nodes; };
static std::map<Handle, Stream> streams;
static thread_local std::vector<Handle> contexts;
static thread_local int capture_mode = 0;
static uintptr_t last_handle = 0x500000;
static long live_allocations = 0;

static Handle fresh() { return (Handle)(last_handle += 64); }
#define NEEDS_CONTEXT if (contexts.empty()) return INVALID_CONTEXT

extern "C" {
// --- devices and contexts ---
Status cuInit(unsigned) { return OK; }
Status cuDriverGetVersion(int* version) { return *version = 13000, OK; }
Status cuDeviceGetCount(int* count) { return *count = 1, OK; }
Status cuDeviceGet(int* device, int index) { return *device = index, index ? INVALID_DEVICE : OK; }
Status cuDeviceGetName(char* name, int size, int) { return snprintf(name, size, "a stub"), OK; }
Status cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = 1ull << 33, OK; }
Status cuDeviceGetUuid_v2(char* uuid, int) { return memset(uuid, 7, 16), OK; }
Status cuDeviceGetAttribute(int* value, int attribute, int) { return *value = attribute == 75 ? 9 : 0, OK; }
Status cuDevicePrimaryCtxRetain(Handle* context, int) { return *context = PRIMARY, OK; }
Status cuDevicePrimaryCtxRelease_v2(int) { return OK; }
Status cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) { return *flags = 0, *active = 1, OK; }
Status cuCtxGetCurrent(Handle* context) { return *context = contexts.empty() ? nullptr : contexts.back(), OK; }
Status cuCtxSetCurrent(Handle context) {
    if (!contexts.empty()) contexts.pop_back();
    if (context) contexts.push_back(context);
    return OK;
}
Status cuCtxPushCurrent_v2(Handle context) { return contexts.push_back(context), OK; }
Status cuCtxPopCurrent_v2(Handle* context) {
    NEEDS_CONTEXT;
    if (context) *context = contexts.back();
    return contexts.pop_back(), OK;
}
Status cuCtxGetDevice(int* device) { NEEDS_CONTEXT; return *device = 0, OK; }
Status cuCtxSynchronize() { NEEDS_CONTEXT; return OK; }
Status cuCtxGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, OK; }

// --- streams and events ---
Status cuStreamCreate(Handle* stream, unsigned flags) {
    NEEDS_CONTEXT;
    return *stream = fresh(), streams[*stream].flags = flags, OK;
}
Status cuStreamCreateWithPriority(Handle* stream, unsigned flags, int) { return cuStreamCreate(stream, flags); }
Status cuStreamGetPriority(Handle, int* priority) { return *priority = 0, OK; }
Status cuStreamGetFlags(Handle stream, unsigned* flags) { return *flags = streams[stream].flags, OK; }
Status cuStreamDestroy_v2(Handle stream) { return streams.erase(stream), OK; }
Status cuStreamGetCtx(Handle, Handle* context) { return *context = PRIMARY, OK; }
Status cuStreamGetDevice(Handle, int* device) { return *device = 0, OK; }
Status cuStreamSynchronize(Handle) { NEEDS_CONTEXT; return OK; }
Status cuStreamQuery(Handle) { NEEDS_CONTEXT; return OK; }
Status cuStreamWaitEvent(Handle, Handle, unsigned) { NEEDS_CONTEXT; return OK; }
Status cuEventCreate(Handle* event, unsigned) { NEEDS_CONTEXT; return *event = fresh(), OK; }
Status cuEventRecord(Handle, Handle) { NEEDS_CONTEXT; return OK; }
Status cuEventQuery(Handle) { return OK; }
Status cuEventSynchronize(Handle) { return OK; }
Status cuEventDestroy_v2(Handle) { return OK; }

// --- memory ---
Status cuMemAlloc_v2(Pointer* pointer, size_t bytes) {
    NEEDS_CONTEXT;
    if (bytes > 1ull << 33) return OUT_OF_MEMORY;
    *pointer = (Pointer)aligned_alloc(256, (bytes + 255) / 256 * 256);
    memset((void*)*pointer, 0xab, bytes);
    return ++live_allocations, OK;
}
Status cuMemFree_v2(Pointer pointer) {
    NEEDS_CONTEXT;
    if (capture_mode != 2) return CAPTURE_UNSUPPORTED;  // as if the thread always captured: only "relaxed" may free
    free((void*)pointer);
    return --live_allocations, OK;
}
long stub_live_allocations() { return live_allocations; }
Status cuMemGetInfo_v2(size_t* free_bytes, size_t* total) { return *free_bytes = 100, *total = 200, OK; }
Status cuPointerGetAttribute(void*, int, Pointer) { return 1; }  // pageable host memory
static bool captured(Handle stream, int node) {
    if (!streams[stream].capturing) return false;
    return streams[stream].nodes.push_back(node), true;
}
Status cuMemcpyHtoDAsync_v2(Pointer to, const void* from, size_t bytes, Handle) {
    NEEDS_CONTEXT;
    return memcpy((void*)to, from, bytes), OK;
}
Status cuMemcpyDtoHAsync_v2(void* to, Pointer from, size_t bytes, Handle) {
    NEEDS_CONTEXT;
    return memcpy(to, (void*)from, bytes), OK;
}
Status cuMemcpyAsync(Pointer to, Pointer from, size_t bytes, Handle stream) {
    NEEDS_CONTEXT;
    if (!captured(stream, MEMCPY)) memmove((void*)to, (void*)from, bytes);
    return OK;
}
Status cuMemsetD8Async(Pointer to, unsigned char value, size_t bytes, Handle stream) {
    NEEDS_CONTEXT;
    if (!captured(stream, MEMSET)) memset((void*)to, value, bytes);
    return OK;
}

// --- kernels ---
Status cuModuleLoadData(Handle* module, const void* image) {
    NEEDS_CONTEXT;
    return *module = fresh(), memcmp(image, "\177ELF", 4) ? 200 : OK;
}
static std::map<Handle, Handle> functions;  // function -> its name's copy
Status cuModuleGetFunction(Handle* function, Handle, const char* name) {
    if (strncmp(name, "qk_", 3)) return NOT_FOUND;
    return *function = fresh(), functions[*function] = strdup(name), OK;
}
Status cuFuncLoad(Handle) { return OK; }
Status cuFuncSetAttribute(Handle, int attribute, int bytes) { return attribute == 8 && bytes > 49152 ? OK : 1; }
Status cuLaunchKernel(Handle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, Handle stream, void** parameters, void** extra) {
    NEEDS_CONTEXT;
    if (!parameters || extra) return 1;
    if (FILE* log = fopen(getenv("STUB_LAUNCHES"), "a")) {
        fprintf(log, "%s %u %u %u %u %u %u %u %llu %llu %lld\n", (char*)functions[function], gx, gy, gz, bx, by, bz, shared,
                *(Pointer*)parameters[0], *(Pointer*)parameters[1], *(long long*)parameters[2]);
        fclose(log);
    }
    captured(stream, KERNEL);
    return OK;
}

// --- graphs ---
Status cuStreamIsCapturing(Handle stream, int* status) {
    if (stream == LEGACY) NEEDS_CONTEXT;
    return *status = streams[stream].capturing, OK;
}
Status cuStreamBeginCapture_v2(Handle stream, int) {
    NEEDS_CONTEXT;
    if (stream == LEGACY) return CAPTURE_UNSUPPORTED;
    return streams[stream].capturing = true, streams[stream].nodes.clear(), OK;
}
Status cuStreamEndCapture(Handle stream, Handle* graph) {
    NEEDS_CONTEXT;
    *graph = nullptr;
    if (!streams[stream].capturing) return ILLEGAL_STATE;
    streams[stream].capturing = false;
    return *graph = new std::vector<int>(streams[stream].nodes), OK;
}
Status cuThreadExchangeStreamCaptureMode(int* mode) {
    const int before = capture_mode;
    return capture_mode = *mode, *mode = before, OK;
}
Status cuGraphGetNodes(Handle graph, Handle* nodes, size_t* count) {
    auto& all = *(std::vector<int>*)graph;
    if (!nodes) return *count = all.size(), OK;
    for (size_t i = 0; i < *count; ++i) nodes[i] = &all[i];
    return OK;
}
Status cuGraphNodeGetType(Handle node, int* type) { return *type = *(int*)node, OK; }
Status cuGraphInstantiateWithFlags(Handle* executable, Handle, unsigned long long) { return *executable = fresh(), OK; }
Status cuGraphDestroy(Handle graph) { return delete (std::vector<int>*)graph, OK; }
Status cuGraphExecDestroy(Handle) { return OK; }
Status cuGraphLaunch(Handle, Handle) { NEEDS_CONTEXT; return OK; }

// --- how the bindings find all this ---
Status cuGetErrorName(Status, const char** text) { return *text = "STUB", OK; }
Status cuGetErrorString(Status, const char** text) { return *text = "the stub refuses", OK; }
Status cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int* found) {
    Dl_info self;
    dladdr((void*)cuInit, &self);
    Handle library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    char versioned[256];
    *function = nullptr;
    for (const char* suffix : {"_v2", "", "WithFlags"}) {
        snprintf(versioned, sizeof versioned, "%s%s", name, suffix);
        if ((*function = dlsym(library, versioned))) break;
    }
    if (found) *found = !*function;
    return *function ? OK : NOT_FOUND;
}
Status cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}
}
