// The handler that XLA calls where a jitted function of JAX calls a program: `jax.ffi`, CPU only.
//
// A program is registered under the digest of what it computes, which is an attribute of the custom call: an executable
// that JAX has written to disk then finds the same program in another process, or gets an error. A call takes a free
// frame (activations and scratch: what a session has besides states), sets the addresses of XLA's buffers and calls the
// compiled entry point. No Python runs. A call allocates only when more calls overlap than ever before.
//
// A call is text that anyone can write (`jax.ffi.ffi_call`), so it is checked: the number of symbols, their ranges, the
// element types of all buffers, and their sizes, which the program computes from the symbols.
#include "abi.h"

#include <sys/mman.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <new>
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
    const int64_t* ranges;  // the least and the greatest value of each symbol
    const int64_t* sizes;   // the bytes of each argument and then of each result: pairs of a qx_operation and a number
    const char* const* types;  // the element type of each argument and then of each result, by its name in MLIR
    int32_t input_count;
    int32_t output_count;
    int32_t symbol_count;
    int32_t operation_count;
};

// A size in postfix order: QX_NUMBER and QX_SYMBOL push, the others replace two values by one, QX_END takes the size.
enum qx_operation : int64_t {
    QX_NUMBER,
    QX_SYMBOL,
    QX_ADD,
    QX_MULTIPLY,
    QX_FLOORDIV,
    QX_MOD,
    QX_MAX,
    QX_MIN,
    QX_END,
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
    int32_t int8_units;
    int32_t bf16_units;
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

// The element types that programs have (`DType` of operands.py), under XLA's names and MLIR's.
struct TypeName {
    ffi::DataType type;
    const char* name;
};
constexpr TypeName TYPES[] = {
    {ffi::DataType::F64, "f64"}, {ffi::DataType::F32, "f32"}, {ffi::DataType::F16, "f16"},
    {ffi::DataType::BF16, "bf16"}, {ffi::DataType::S64, "i64"}, {ffi::DataType::S32, "i32"},
    {ffi::DataType::S16, "i16"}, {ffi::DataType::S8, "i8"}, {ffi::DataType::U8, "ui8"},
    {ffi::DataType::PRED, "i1"},
};

constexpr TypeName NO_TYPE = {ffi::DataType::INVALID, "a type that XLA does not have"};  // no buffer is of it

const TypeName* type_named(std::string_view name) {
    for (const TypeName& each : TYPES)
        if (name == each.name) return &each;
    return &NO_TYPE;
}

std::string name_of(ffi::DataType type) {
    for (const TypeName& each : TYPES)
        if (type == each.type) return each.name;
    return "XLA's type " + std::to_string(int(type));
}

struct Entry {
    qc_entry function;
    std::vector<char*> arenas;
    std::vector<int64_t> activations;
    std::vector<int32_t> inputs, outputs;
    std::vector<int64_t> ranges, sizes;
    std::vector<const TypeName*> types;
};

// What one call has for itself. `arenas` has a list for each entry point; `stack` is for sizes.
struct Frame {
    Pages activations, scratch;
    qc_ctx context;
    std::vector<std::vector<char*>> arenas;
    std::vector<int64_t> stack;
};

struct Program {
    qx_caller call;
    qc_parallel parallel;
    int64_t activation_nbytes, scratch_stride;
    int32_t num_threads, int8_units, bf16_units;
    std::vector<Entry> entries;
    std::vector<std::string> kernels;

    std::mutex lock;
    std::condition_variable idle;
    int running = 0;
    std::vector<std::unique_ptr<Frame>> free;
    size_t made = 0;  // `free` has room for as many

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
        std::unique_ptr<Frame> frame(
            new Frame{Pages(activation_nbytes), Pages(scratch_stride * num_threads), {}, {}, {}});
        if (!frame->activations.base() || !frame->scratch.base()) return nullptr;
        frame->context.parallel = parallel;
        frame->context.scratch = frame->scratch.base();
        frame->context.scratch_stride = scratch_stride;
        frame->context.num_threads = num_threads;
        frame->context.int8_units = int8_units;
        frame->context.bf16_units = bf16_units;
        for (const Entry& entry : entries) {
            std::vector<char*> arenas = entry.arenas;
            for (size_t i = 0; i < arenas.size(); ++i)
                if (entry.activations[i] >= 0) arenas[i] = frame->activations.base() + entry.activations[i];
            frame->arenas.push_back(std::move(arenas));
            frame->stack.resize(std::max(frame->stack.size(), entry.sizes.size() / 2));
        }
        std::lock_guard<std::mutex> held(lock);
        free.reserve(made + 1);
        ++made;
        return frame;
    }

    // Allocates nothing.
    void give_back(std::unique_ptr<Frame> frame) {
        std::lock_guard<std::mutex> held(lock);
        free.push_back(std::move(frame));
    }
};

// A frame for the length of a call.
class Lease {
   public:
    explicit Lease(Program& program) : program_(program), frame_(program.take()) {}
    ~Lease() {
        if (frame_) program_.give_back(std::move(frame_));
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    Frame* get() const { return frame_.get(); }

   private:
    Program& program_;
    std::unique_ptr<Frame> frame_;
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

// An error if the symbols are not as many as the entry point has, or one is out of its range.
ffi::Error check_symbols(const Entry& entry, ffi::Span<const int64_t> symbols) {
    if (symbols.size() * 2 != entry.ranges.size())
        return ffi::Error::InvalidArgument("the call gives " + std::to_string(symbols.size()) +
                                           " sizes to an entry point that has " +
                                           std::to_string(entry.ranges.size() / 2));
    for (size_t i = 0; i < symbols.size(); ++i) {
        const int64_t least = entry.ranges[2 * i], greatest = entry.ranges[2 * i + 1];
        if (symbols[i] < least || symbols[i] > greatest)
            return ffi::Error::InvalidArgument("size " + std::to_string(i) + " of the call is " +
                                               std::to_string(symbols[i]) + ", and must lie in " +
                                               std::to_string(least) + "…" + std::to_string(greatest));
    }
    return ffi::Error::Success();
}

int64_t floor_divide(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

int64_t combined(int64_t operation, int64_t a, int64_t b) {
    switch (operation) {
        case QX_ADD: return a + b;
        case QX_MULTIPLY: return a * b;
        case QX_FLOORDIV: return b ? floor_divide(a, b) : -1;
        case QX_MOD: return b ? a - floor_divide(a, b) * b : -1;
        case QX_MAX: return std::max(a, b);
        default: return std::min(a, b);
    }
}

// An error that names the first buffer of another element type: f16 has as many bytes as bf16, and other numbers.
ffi::Error check_types(const Entry& entry, ffi::RemainingArgs arguments, ffi::RemainingRets results) {
    for (size_t i = 0; i < entry.types.size(); ++i) {
        const bool is_argument = i < arguments.size();
        const size_t place = is_argument ? i : i - arguments.size();
        const ffi::DataType given = is_argument ? arguments.get<ffi::AnyBuffer>(place)->element_type()
                                                : (*results.get<ffi::AnyBuffer>(place))->element_type();
        if (given != entry.types[i]->type)
            return ffi::Error::InvalidArgument((is_argument ? "argument " : "result ") + std::to_string(place) +
                                               " of the call is " + name_of(given) + ", and its program takes " +
                                               entry.types[i]->name);
    }
    return ffi::Error::Success();
}

// An error that names the first buffer of another size than the entry point takes for these symbols.
ffi::Error check_sizes(const Entry& entry, ffi::Span<const int64_t> symbols, ffi::RemainingArgs arguments,
                       ffi::RemainingRets results, std::vector<int64_t>& stack) {
    size_t top = 0, buffer = 0;
    for (size_t i = 0; i < entry.sizes.size(); i += 2) {
        const int64_t operation = entry.sizes[i], number = entry.sizes[i + 1];
        if (operation == QX_NUMBER || operation == QX_SYMBOL) {
            stack[top++] = operation == QX_NUMBER ? number : symbols[size_t(number)];
        } else if (operation != QX_END) {
            --top;
            stack[top - 1] = combined(operation, stack[top - 1], stack[top]);
        } else {
            const bool is_argument = buffer < arguments.size();
            const size_t place = is_argument ? buffer : buffer - arguments.size();
            const size_t given = is_argument ? arguments.get<ffi::AnyBuffer>(place)->size_bytes()
                                             : (*results.get<ffi::AnyBuffer>(place))->size_bytes();
            const int64_t wanted = stack[--top];
            if (wanted < 0 || given != size_t(wanted))
                return ffi::Error::InvalidArgument((is_argument ? "argument " : "result ") + std::to_string(place) +
                                                   " of the call has " + std::to_string(given) +
                                                   " bytes, and its program takes " + std::to_string(wanted) +
                                                   " at these sizes");
            ++buffer;
        }
    }
    return ffi::Error::Success();
}

ffi::Error no_memory() {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "the system gives no memory for the program's activations");
}

ffi::Error checked(std::string_view key, int64_t number, ffi::Span<const int64_t> symbols,
                   ffi::RemainingArgs arguments, ffi::RemainingRets results) {
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
        return ffi::Error::InvalidArgument(
            "the call has " + std::to_string(arguments.size()) + " arguments and " + std::to_string(results.size()) +
            " results, its program " + std::to_string(entry.inputs.size()) + " and " +
            std::to_string(entry.outputs.size()));
    if (ffi::Error error = check_symbols(entry, symbols); error.failure()) return error;
    if (ffi::Error error = check_types(entry, arguments, results); error.failure()) return error;
    const Lease lease(*program);
    Frame* const frame = lease.get();
    if (!frame) return no_memory();
    if (ffi::Error error = check_sizes(entry, symbols, arguments, results, frame->stack); error.failure()) return error;
    std::vector<char*>& arenas = frame->arenas[size_t(number)];
    for (size_t i = 0; i < entry.inputs.size(); ++i)
        arenas[size_t(entry.inputs[i])] = static_cast<char*>(arguments.get<ffi::AnyBuffer>(i)->untyped_data());
    for (size_t i = 0; i < entry.outputs.size(); ++i)
        arenas[size_t(entry.outputs[i])] = static_cast<char*>((*results.get<ffi::AnyBuffer>(i))->untyped_data());
    frame->context.error_code = QC_OK;
    frame->context.error_kernel = -1;
    const int32_t failed = program->call(entry.function, &frame->context, arenas.data(), symbols.begin());
    return failed ? kernel_error(*program, frame->context) : ffi::Error::Success();
}

// No exception leaves the handler: XLA calls it as C.
ffi::Error run(std::string_view key, int64_t number, ffi::Span<const int64_t> symbols, ffi::RemainingArgs arguments,
               ffi::RemainingRets results) {
    try {
        return checked(key, number, symbols, arguments, results);
    } catch (const std::bad_alloc&) {
        return no_memory();
    } catch (const std::exception& error) {
        return ffi::Error::Internal(error.what());
    }
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(qx_run, run,
                              ffi::Ffi::Bind()
                                  .Attr<std::string_view>("program")
                                  .Attr<int64_t>("entry")
                                  .Attr<ffi::Span<const int64_t>>("symbols")
                                  .RemainingArgs()
                                  .RemainingRets());

namespace {

void* added(const char* key, const qx_program* given) {
    auto program = std::make_shared<Program>();
    program->call = given->call;
    program->parallel = given->parallel;
    program->activation_nbytes = given->activation_nbytes;
    program->scratch_stride = given->scratch_stride;
    program->num_threads = given->num_threads;
    program->int8_units = given->int8_units;
    program->bf16_units = given->bf16_units;
    const size_t arenas = size_t(given->arena_count);
    for (int32_t i = 0; i < given->entry_count; ++i) {
        const qx_entry& each = given->entries[i];
        std::vector<const TypeName*> types;
        for (int32_t j = 0; j < each.input_count + each.output_count; ++j) types.push_back(type_named(each.types[j]));
        program->entries.push_back({each.function,
                                    {each.arenas, each.arenas + arenas},
                                    {each.activations, each.activations + arenas},
                                    {each.inputs, each.inputs + each.input_count},
                                    {each.outputs, each.outputs + each.output_count},
                                    {each.ranges, each.ranges + 2 * each.symbol_count},
                                    {each.sizes, each.sizes + 2 * each.operation_count},
                                    std::move(types)});
    }
    program->kernels.assign(given->kernels, given->kernels + given->kernel_count);
    std::unique_lock<std::shared_mutex> held(registry_lock);
    registry()[key].push_back(program);
    return program.get();
}

}  // namespace

extern "C" {

// A handle for `qx_unregister`; null if there is no memory. Copies what `given` points to, but the memory of arenas and
// functions.
void* qx_register(const char* key, const qx_program* given) {
    try {
        return added(key, given);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
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
