// A libcuda.so.1 of host memory, on which the real cuda.bindings and cuda.core run: memory is the host's, streams are
// done at once, a graph repeats what was captured. What needs a current context fails without one, as in the driver. A
// capture spreads by events and ends as the driver's do: 901 invalidated, 904 unjoined, 908 in another thread.
//
// Kernels are noted (one line per launch in the file STUB_LAUNCHES). They run where a process gives `stub_runner`, as
// stub_twins.py does: the simulated GPU's twin of the same text. test_plumbing.py runs the cuda backend on this,
// without a runner; test_check_stub.py runs `make gpu-check`. Faults by a part of a kernel's name, for tests:
//   STUB_WRONG   flips bits of the result         STUB_FAULT   error 700 from then on, as after an illegal address
//   STUB_REPLAY  flips them in replays alone      STUB_DIE     ends the process        STUB_HANG   never returns
#include <dlfcn.h>
#include <pthread.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <time.h>
#include <unistd.h>

typedef int Status;
typedef void* Handle;
typedef unsigned long long Pointer;

static const Handle PRIMARY = (Handle)0x1111000, LEGACY = (Handle)1;
enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, ILLEGAL_STATE = 401,
       NOT_FOUND = 500, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_UNJOINED = 904,
       CAPTURE_WRONG_THREAD = 908 };
static const std::map<Status, const char*> NAMES = {
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"}, {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"}, {ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"}, {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
    {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
    {CAPTURE_UNJOINED, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"},
    {CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"}};
enum { KERNEL = 0, MEMCPY = 1, MEMSET = 2 };

struct Node {
    int kind;
    std::function<void()> run;
};
typedef std::vector<Node> Graph;
struct Capture {
    Handle origin;
    int mode;
    pthread_t thread;
    Graph* graph = new Graph;
    bool invalid = false;
};
struct Stream { unsigned flags = 0; Capture* capture = nullptr; bool joined = true; };
struct Event { Capture* capture = nullptr; Handle stream = nullptr; double at = 0; };
static std::map<Handle, Stream> streams;
static std::map<Handle, Event> events;
static std::set<Handle> graphs, executables;  // what lives: a call on anything else, or a second destroy, aborts
static std::map<Handle, Graph> replayed;      // executable -> its nodes
static std::map<Pointer, size_t> allocations;
static Status lost = 0;  // what every call gives after a fault
static Status instantiating = OK;
static std::string calls;
static thread_local std::vector<Handle> contexts;
static thread_local int capture_mode = 0;
static uintptr_t last_handle = 0x500000;
static long live_allocations = 0;

static Handle fresh() { return (Handle)(last_handle += 64); }
static void must_live(const std::set<Handle>& all, Handle one, const char* who) {
    if (all.count(one)) return;
    fprintf(stderr, "stub: %s of something that is gone\n", who);
    abort();
}
#define CALLED calls += std::string(__func__) + " "
#define NEEDS_CONTEXT if (contexts.empty() || lost) return lost ? lost : INVALID_CONTEXT

static double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}
static bool wanted(const char* variable, const char* kernel) {
    const char* part = getenv(variable);
    return part && *part && strstr(kernel, part);
}

extern "C" {
// --- devices and contexts ---
Status cuInit(unsigned) { return OK; }
Status cuGetExportTable(const void** table, const void*) { return *table = nullptr, NOT_FOUND; }  // NVRTC asks
Status cuDriverGetVersion(int* version) { return *version = 13000, OK; }
Status cuDeviceGetCount(int* count) { return *count = 1, OK; }
Status cuDeviceGet(int* device, int index) { return *device = index, index ? INVALID_DEVICE : OK; }
Status cuDeviceGetName(char* name, int size, int) { return snprintf(name, size, "a stub"), OK; }
Status cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = 1ull << 33, OK; }
Status cuDeviceGetUuid_v2(char* uuid, int) { return memset(uuid, 7, 16), OK; }
Status cuDeviceGetAttribute(int* value, int attribute, int) {
    static const std::map<int, int> known = {  // as CUdevice_attribute counts
        {75, 9}, {16, 2}, {97, 232448}, {81, 233472}, {10, 32}, {39, 2048}, {82, 65536}};
    const auto found = known.find(attribute);
    return *value = found == known.end() ? 0 : found->second, OK;
}
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
Status cuStreamWaitEvent(Handle stream, Handle event, unsigned) {
    NEEDS_CONTEXT;
    const Event& at = events[event];
    if (!at.capture) return OK;
    Stream& waits = streams[stream];
    if (!waits.capture) waits.capture = at.capture, waits.joined = false;  // a fork
    else streams[at.stream].joined = true;
    return OK;
}
Status cuEventCreate(Handle* event, unsigned) { NEEDS_CONTEXT; return *event = fresh(), OK; }
Status cuEventRecord(Handle event, Handle stream) {
    NEEDS_CONTEXT;
    return events[event] = {streams[stream].capture, stream, now()}, OK;
}
Status cuEventElapsedTime_v2(float* milliseconds, Handle from, Handle to) {
    return *milliseconds = (float)(events[to].at - events[from].at), OK;
}
Status cuEventElapsedTime(float* milliseconds, Handle from, Handle to) {
    return cuEventElapsedTime_v2(milliseconds, from, to);
}
Status cuEventQuery(Handle) { return OK; }
Status cuEventSynchronize(Handle) { return OK; }
Status cuEventDestroy_v2(Handle) { return OK; }

// --- memory ---
Status cuMemAlloc_v2(Pointer* pointer, size_t bytes) {
    NEEDS_CONTEXT;
    if (bytes > 1ull << 33) return OUT_OF_MEMORY;
    *pointer = (Pointer)aligned_alloc(256, (bytes + 255) / 256 * 256);
    memset((void*)*pointer, 0xab, bytes);
    allocations[*pointer] = bytes;
    return ++live_allocations, OK;
}
Status cuMemFree_v2(Pointer pointer) {
    NEEDS_CONTEXT;
    if (capture_mode != 2) return CAPTURE_UNSUPPORTED;  // as if the thread always captured: only "relaxed" may free
    free((void*)pointer);
    allocations.erase(pointer);
    return --live_allocations, OK;
}
long stub_live_allocations() { return live_allocations; }
Status cuMemGetInfo_v2(size_t* free_bytes, size_t* total) { return *free_bytes = 100, *total = 200, OK; }
Status cuPointerGetAttribute(void*, int, Pointer) { return 1; }  // pageable host memory
// Runs it now, or makes it a node of the stream's capture.
static Status on(Handle stream, int kind, std::function<void()> run) {
    Stream& at = streams[stream];
    if (!at.capture) return run(), OK;
    at.joined = stream == at.capture->origin;
    return at.capture->graph->push_back({kind, run}), OK;
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
    return on(stream, MEMCPY, [=] { memmove((void*)to, (void*)from, bytes); });
}
Status cuMemsetD8Async(Pointer to, unsigned char value, size_t bytes, Handle stream) {
    NEEDS_CONTEXT;
    return on(stream, MEMSET, [=] { memset((void*)to, value, bytes); });
}
Status cuMemsetD32Async(Pointer to, unsigned value, size_t count, Handle stream) {
    NEEDS_CONTEXT;
    return on(stream, MEMSET, [=] { for (size_t i = 0; i < count; ++i) ((unsigned*)to)[i] = value; });
}
Status cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t bytes, Handle stream) {
    return cuMemcpyAsync(to, from, bytes, stream);
}

// --- kernels ---
// What a kernel is called beyond its number: stub_twins.py knows, by the cubin that the number is of.
static const char* (*name_of_kernel)(unsigned long long, const char*);
void stub_names(const char* (*names)(unsigned long long, const char*)) { name_of_kernel = names; }
static std::map<Handle, unsigned long long> cubins;  // library or module -> digest of its image
static unsigned long long digest(const void* image) {  // FNV-1a, up to the end of the section headers
    const unsigned char* const bytes = (const unsigned char*)image;
    unsigned long long value = 0xcbf29ce484222325, end;
    unsigned short entry, entries;
    memcpy(&end, bytes + 40, 8), memcpy(&entry, bytes + 58, 2), memcpy(&entries, bytes + 60, 2);
    for (unsigned long long i = 0; i < end + entry * entries; ++i) value = (value ^ bytes[i]) * 0x100000001b3;
    return value;
}
static Status load(Handle* library, const void* image) {
    *library = fresh();
    if (memcmp(image, "\177ELF", 4)) return 200;
    if (name_of_kernel) cubins[*library] = digest(image);
    return OK;
}
Status cuLibraryLoadData(Handle* library, const void* image, void*, void*, unsigned, void*, void*, unsigned) {
    CALLED;
    return load(library, image);
}
Status cuLibraryUnload(Handle) { return CALLED, OK; }
static std::map<Handle, Handle> functions;  // function -> its name's copy
Status cuLibraryGetKernel(Handle* kernel, Handle library, const char* name) {
    if (strncmp(name, "qk_", 3)) return NOT_FOUND;
    if (name_of_kernel) name = name_of_kernel(cubins[library], name);
    return *kernel = fresh(), functions[*kernel] = strdup(name), OK;
}
Status cuKernelGetFunction(Handle* function, Handle kernel) {
    NEEDS_CONTEXT;
    return *function = fresh(), functions[*function] = functions[kernel], OK;
}
Status cuModuleLoadData(Handle* module, const void* image) {
    NEEDS_CONTEXT;
    return load(module, image);
}
Status cuModuleUnload(Handle) { return OK; }
Status cuModuleGetFunction(Handle* function, Handle module, const char* name) {
    return cuLibraryGetKernel(function, module, name);
}
Status cuFuncGetAttribute(int* value, int, Handle) { return *value = 0, OK; }
Status cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Handle, int, size_t) { return *blocks = 1, OK; }
Status cuFuncLoad(Handle) { return CALLED, OK; }
Status cuFuncSetAttribute(Handle, int attribute, int bytes) { return attribute == 8 && bytes > 49152 ? OK : 1; }
// What runs kernels, of stub_twins.py: how many parameters one has (-1: no such twin), and one launch.
static int (*parameter_count)(const char*);
static int (*run_twin)(const char*, const unsigned*, unsigned, const Pointer*);
void stub_runner(int (*count)(const char*), int (*run)(const char*, const unsigned*, unsigned, const Pointer*)) {
    parameter_count = count, run_twin = run;
}
static void run_kernel(const char* name, const std::vector<unsigned>& sizes, unsigned shared,
                       const std::vector<Pointer>& values, bool replay) {
    if (lost || !run_twin) return;
    if (wanted("STUB_DIE", name)) _exit(9);
    if (wanted("STUB_HANG", name)) pause();
    if (wanted("STUB_FAULT", name)) lost = 700;
    else if (run_twin(name, sizes.data(), shared, values.data())) lost = 719;
    if (wanted("STUB_WRONG", name) || (replay && wanted("STUB_REPLAY", name)))
        for (size_t i = values.size(); i-- > 0;)  // the last parameter that is memory is written
            if (allocations.count(values[i])) {
                for (size_t at = 0; at < 64 && at < allocations[values[i]]; ++at)
                    ((unsigned char*)values[i])[at] ^= 0x40;
                break;
            }
}
Status cuLaunchKernel(Handle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, Handle stream, void** parameters, void** extra) {
    NEEDS_CONTEXT;
    if (!parameters || extra) return 1;
    const char* name = (char*)functions[function];
    if (FILE* log = getenv("STUB_LAUNCHES") ? fopen(getenv("STUB_LAUNCHES"), "a") : nullptr) {
        fprintf(log, "%s %u %u %u %u %u %u %u %llu %llu %lld\n", name, gx, gy, gz, bx, by, bz, shared,
                *(Pointer*)parameters[0], *(Pointer*)parameters[1], *(long long*)parameters[2]);
        fclose(log);
    }
    std::vector<Pointer> values;
    if (run_twin) {
        const int count = parameter_count(name);
        if (count < 0) return NOT_FOUND;
        for (int i = 0; i < count; ++i) values.push_back(*(Pointer*)parameters[i]);
    }
    const std::vector<unsigned> sizes = {gx, gy, gz, bx, by, bz};
    const bool replay = streams[stream].capture != nullptr;
    return on(stream, KERNEL, [=] { run_kernel(name, sizes, shared, values, replay); });
}

struct LaunchConfig {  // CUlaunchConfig
    unsigned grid[3], block[3], shared;
    Handle stream;
    void* attributes;
    unsigned count;
};
Status cuLaunchKernelEx(const LaunchConfig* how, Handle function, void** parameters, void** extra) {
    const int attribute = how->count == 1 ? *(int*)how->attributes : 0;
    if (attribute != 6) return 1;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    return cuLaunchKernel(function, how->grid[0], how->grid[1], how->grid[2], how->block[0], how->block[1],
                          how->block[2], how->shared, how->stream, parameters, extra);
}

// --- graphs ---
static int status_of(Handle stream) {
    const Capture* capture = streams[stream].capture;
    return !capture ? 0 : capture->invalid ? 2 : 1;
}
Status cuStreamIsCapturing(Handle stream, int* status) {
    if (stream == LEGACY) NEEDS_CONTEXT;
    return *status = status_of(stream), OK;
}
Status cuStreamGetCaptureInfo_v3(Handle stream, int* status, uint64_t* id, Handle* graph, Handle**, void**,
                                 size_t* count) {
    CALLED;
    *status = status_of(stream);
    if (id) *id = 1;
    if (graph) *graph = *status == 1 ? streams[stream].capture->graph : nullptr;
    if (count) *count = 0;
    return OK;
}
Status cuStreamBeginCapture_v2(Handle stream, int mode) {
    CALLED;
    NEEDS_CONTEXT;
    if (stream == LEGACY) return CAPTURE_UNSUPPORTED;
    if (streams[stream].capture) return ILLEGAL_STATE;
    Capture* made = new Capture{stream, mode, pthread_self()};
    graphs.insert(made->graph);
    return streams[stream].capture = made, OK;
}
Status cuStreamEndCapture(Handle stream, Handle* graph) {
    CALLED;
    NEEDS_CONTEXT;
    if (graph) *graph = nullptr;
    Capture* ends = streams[stream].capture;
    if (!ends) return ILLEGAL_STATE;
    if (ends->mode != 2 && !pthread_equal(ends->thread, pthread_self())) return CAPTURE_WRONG_THREAD;
    Status status = ends->invalid ? CAPTURE_INVALIDATED : OK;
    for (auto& [_, other] : streams) {
        if (other.capture != ends) continue;
        if (!other.joined && !status) status = CAPTURE_UNJOINED;
        other.capture = nullptr, other.joined = true;
    }
    for (auto& [_, event] : events)
        if (event.capture == ends) event.capture = nullptr;
    if (status) graphs.erase(ends->graph), delete ends->graph;
    else if (graph) *graph = ends->graph;
    return delete ends, status;
}
void stub_invalidate(Handle stream) {
    streams[stream].capture->invalid = true;
}
int stub_mode(Handle stream) { return streams[stream].capture->mode; }
void stub_instantiate(Status status) { instantiating = status; }
long stub_live_graphs() { return graphs.size() + executables.size(); }
const char* stub_calls() {
    static std::string said;
    return said = calls, calls.clear(), said.c_str();
}
Status cuThreadExchangeStreamCaptureMode(int* mode) {
    const int before = capture_mode;
    return capture_mode = *mode, *mode = before, OK;
}
Status cuGraphGetNodes(Handle graph, Handle* nodes, size_t* count) {
    CALLED;
    must_live(graphs, graph, __func__);
    Graph& all = *(Graph*)graph;
    if (!nodes) return *count = all.size(), OK;
    for (size_t i = 0; i < *count && i < all.size(); ++i) nodes[i] = &all[i];
    return *count = all.size(), OK;
}
Status cuGraphNodeGetType(Handle node, int* type) { return *type = ((Node*)node)->kind, OK; }
Status cuGraphInstantiateWithParams(Handle* executable, Handle graph, void*) {
    CALLED;
    must_live(graphs, graph, __func__);
    if (instantiating) return instantiating;
    replayed[*executable = fresh()] = *(Graph*)graph;
    return executables.insert(*executable), OK;
}
Status cuGraphDestroy(Handle graph) {
    CALLED;
    must_live(graphs, graph, __func__);
    return graphs.erase(graph), delete (Graph*)graph, OK;
}
Status cuGraphExecDestroy(Handle executable) {
    CALLED;
    must_live(executables, executable, __func__);
    return executables.erase(executable), replayed.erase(executable), OK;
}
Status cuGraphLaunch(Handle executable, Handle) {
    NEEDS_CONTEXT;
    must_live(executables, executable, __func__);
    for (const Node& node : replayed[executable]) node.run();
    return lost;
}
Status cuUserObjectCreate(Handle* object, void*, void*, unsigned, unsigned) { return *object = fresh(), OK; }
Status cuUserObjectRelease(Handle, unsigned) { return OK; }
Status cuGraphRetainUserObject(Handle, Handle, unsigned, unsigned) { return OK; }
Status cuGraphReleaseUserObject(Handle, Handle, unsigned) { return OK; }

// --- how the bindings find all this ---
Status cuGetErrorName(Status status, const char** text) {
    const auto found = NAMES.find(status);
    if (found == NAMES.end()) return INVALID_VALUE;
    return *text = found->second, OK;
}
Status cuGetErrorString(Status, const char** text) { return *text = "the stub refuses", OK; }
Status cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int* found) {
    Dl_info self;
    dladdr((void*)cuInit, &self);
    Handle library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    char versioned[256];
    *function = nullptr;
    for (const char* suffix : {"_v3", "_v2", ""}) {
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
