// The handler that XLA calls where a jitted function of JAX calls a program: `jax.ffi`, CPU only.
//
// A program is registered under the digest of what it computes, which is an attribute of the custom call: an executable
// that JAX has written to disk then finds the same program in another process, or gets an error. A call takes a free
// frame (activations and scratch: what a session has besides states), sets the addresses of XLA's buffers and calls the
// compiled entry point. No Python runs, and nothing is allocated once as many frames exist as calls have overlapped.
#include "abi.h"

#include <sys/mman.h>

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

extern "C" {

// Runs an entry point in the pool's floating-point state: `qc_pool_entry` of pool.cpp.
typedef int32_t (*qx_caller)(qc_entry entry, qc_ctx* ctx, char* const* arenas, const int64_t* symbols);

struct qx_entry {
    qc_entry function;
    char* const* arenas;         // shared memory; null where a frame or a call sets the address
    const int64_t* activations;  // offset in the frame's activations, or -1
    const int32_t* inputs;       // positions of arguments and results among the arenas
    const int32_t* outputs;
    int32_t input_count;
    int32_t output_count;
};

struct qx_program {
    qx_caller call;
    qc_parallel parallel;
    int64_t activation_nbytes;
    int64_t scratch_stride;
    int32_t num_threads;
    int32_t arena_count;
    int32_t entry_count;
    int32_t kernel_count;
    const qx_entry* entries;
    const char* const* kernels;  // what an error calls each kernel
};
}

namespace {

// Zeroed pages, private to the process, as the arenas of a session are.
class Pages {
   public:
    explicit Pages(int64_t nbytes) : nbytes_(nbytes > 0 ? size_t(nbytes) : 1) {
        void* const found = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        base_ = found == MAP_FAILED ? nullptr : static_cast<char*>(found);
#ifdef MADV_HUGEPAGE
        if (base_ && nbytes_ >= size_t(4) << 20) madvise(base_, nbytes_, MADV_HUGEPAGE);
#endif
    }
    ~Pages() {
        if (base_) munmap(base_, nbytes_);
    }
    Pages(const Pages&) = delete;
    Pages& operator=(const Pages&) = delete;
    char* base() const { return base_; }

   private:
    size_t nbytes_;
    char* base_;
};

struct Entry {
    qc_entry function;
    std::vector<char*> arenas;
    std::vector<int64_t> activations;
    std::vector<int32_t> inputs, outputs;
};

// What one call has for itself. `arenas` has a list for each entry point.
struct Frame {
    Pages activations, scratch;
    qc_ctx context;
    std::vector<std::vector<char*>> arenas;
};

struct Program {
    qx_caller call;
    qc_parallel parallel;
    int64_t activation_nbytes, scratch_stride;
    int32_t num_threads;
    std::vector<Entry> entries;
    std::vector<std::string> kernels;

    std::mutex lock;
    std::condition_variable idle;
    int running = 0;
    std::vector<std::unique_ptr<Frame>> free;

    // A free frame, or a new one; null if the system has no memory for it.
    std::unique_ptr<Frame> take() {
        {
            std::lock_guard<std::mutex> held(lock);
            if (!free.empty()) {
                std::unique_ptr<Frame> frame = std::move(free.back());
                free.pop_back();
                return frame;
            }
        }
        std::unique_ptr<Frame> frame(new Frame{Pages(activation_nbytes), Pages(scratch_stride * num_threads), {}, {}});
        if (!frame->activations.base() || !frame->scratch.base()) return nullptr;
        frame->context.parallel = parallel;
        frame->context.scratch = frame->scratch.base();
        frame->context.scratch_stride = scratch_stride;
        frame->context.num_threads = num_threads;
        for (const Entry& entry : entries) {
            std::vector<char*> arenas = entry.arenas;
            for (size_t i = 0; i < arenas.size(); ++i)
                if (entry.activations[i] >= 0) arenas[i] = frame->activations.base() + entry.activations[i];
            frame->arenas.push_back(std::move(arenas));
        }
        return frame;
    }

    void give_back(std::unique_ptr<Frame> frame) {
        std::lock_guard<std::mutex> held(lock);
        free.push_back(std::move(frame));
    }
};

std::shared_mutex registry_lock;
using Registry = std::map<std::string, std::vector<std::shared_ptr<Program>>, std::less<>>;
Registry& registry() {
    static Registry* const found = new Registry;
    return *found;  // never destroyed: XLA's threads outlive static destructors
}

// The program of a call. While it lives, `qx_unregister` waits: the program's weights stay in memory.
class Running {
   public:
    explicit Running(std::string_view key) {
        std::shared_lock<std::shared_mutex> held(registry_lock);
        const auto found = registry().find(key);
        if (found == registry().end()) return;
        program_ = found->second.back();
        std::lock_guard<std::mutex> counting(program_->lock);
        ++program_->running;
    }
    ~Running() {
        if (!program_) return;
        std::lock_guard<std::mutex> counting(program_->lock);
        if (--program_->running == 0) program_->idle.notify_all();
    }
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;
    Program* get() const { return program_.get(); }

   private:
    std::shared_ptr<Program> program_;
};

// As `kernel_error` of native.py says it.
ffi::Error kernel_error(const Program& program, const qc_ctx& context) {
    const int32_t number = context.error_kernel;
    const bool known = number >= 0 && size_t(number) < program.kernels.size();
    const std::string where = known ? program.kernels[size_t(number)] : "a kernel";
    if (context.error_code == QC_INDEX_OUT_OF_RANGE)
        return ffi::Error(ffi::ErrorCode::kOutOfRange,
                          where + " met the index " + std::to_string(context.error_value) + ", which is outside 0…" +
                              std::to_string(context.error_limit - 1) +
                              "; check the ids or positions that were passed in");
    return ffi::Error::Internal(where + " failed with code " + std::to_string(context.error_code));
}

ffi::Error run(std::string_view key, int64_t number, ffi::Span<const int64_t> symbols, ffi::RemainingArgs arguments,
               ffi::RemainingRets results) {
    const Running running(key);
    Program* const program = running.get();
    if (!program)
        return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                          "the program of this call was freed, or is of another process: make it callable again "
                          "(qc.jax_callable) and trace the function again");
    if (number < 0 || size_t(number) >= program->entries.size())
        return ffi::Error::InvalidArgument("the program has no entry point " + std::to_string(number));
    const Entry& entry = program->entries[size_t(number)];
    if (arguments.size() != entry.inputs.size() || results.size() != entry.outputs.size())
        return ffi::Error::InvalidArgument("the call has other arguments or results than its program");
    std::unique_ptr<Frame> frame = program->take();
    if (!frame)
        return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                          "the system gives no memory for the program's activations");
    std::vector<char*>& arenas = frame->arenas[size_t(number)];
    for (size_t i = 0; i < entry.inputs.size(); ++i)
        arenas[size_t(entry.inputs[i])] = static_cast<char*>(arguments.get<ffi::AnyBuffer>(i)->untyped_data());
    for (size_t i = 0; i < entry.outputs.size(); ++i)
        arenas[size_t(entry.outputs[i])] = static_cast<char*>((*results.get<ffi::AnyBuffer>(i))->untyped_data());
    frame->context.error_code = QC_OK;
    frame->context.error_kernel = -1;
    const int32_t failed = program->call(entry.function, &frame->context, arenas.data(), symbols.begin());
    const ffi::Error error = failed ? kernel_error(*program, frame->context) : ffi::Error::Success();
    program->give_back(std::move(frame));
    return error;
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(qx_run, run,
                              ffi::Ffi::Bind()
                                  .Attr<std::string_view>("program")
                                  .Attr<int64_t>("entry")
                                  .Attr<ffi::Span<const int64_t>>("symbols")
                                  .RemainingArgs()
                                  .RemainingRets());

extern "C" {

// A handle for `qx_unregister`. Copies what `given` points to, but the memory of arenas and functions.
void* qx_register(const char* key, const qx_program* given) {
    auto program = std::make_shared<Program>();
    program->call = given->call;
    program->parallel = given->parallel;
    program->activation_nbytes = given->activation_nbytes;
    program->scratch_stride = given->scratch_stride;
    program->num_threads = given->num_threads;
    const size_t arenas = size_t(given->arena_count);
    for (int32_t i = 0; i < given->entry_count; ++i) {
        const qx_entry& each = given->entries[i];
        program->entries.push_back({each.function,
                                    {each.arenas, each.arenas + arenas},
                                    {each.activations, each.activations + arenas},
                                    {each.inputs, each.inputs + each.input_count},
                                    {each.outputs, each.outputs + each.output_count}});
    }
    program->kernels.assign(given->kernels, given->kernels + given->kernel_count);
    std::unique_lock<std::shared_mutex> held(registry_lock);
    registry()[key].push_back(program);
    return program.get();
}

// Removes a registration and returns when no call of it runs any more. The caller holds no lock that a call needs.
void qx_unregister(const char* key, void* handle) {
    std::shared_ptr<Program> removed;
    {
        std::unique_lock<std::shared_mutex> held(registry_lock);
        const auto found = registry().find(key);
        if (found == registry().end()) return;
        auto& programs = found->second;
        for (auto each = programs.begin(); each != programs.end(); ++each)
            if (each->get() == handle) {
                removed = std::move(*each);
                programs.erase(each);
                break;
            }
        if (programs.empty()) registry().erase(found);
    }
    if (!removed) return;
    std::unique_lock<std::mutex> counting(removed->lock);
    removed->idle.wait(counting, [&] { return removed->running == 0; });
}

// Frames of a registration that no call uses now.
int64_t qx_free_frames(void* handle) {
    Program* const program = static_cast<Program*>(handle);
    std::lock_guard<std::mutex> held(program->lock);
    return int64_t(program->free.size());
}

}  // extern "C"
