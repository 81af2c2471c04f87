// Runs compiled programs with every arena and argument in memory of its own, to the byte: what lies before and behind
// is poisoned for AddressSanitizer, and a page that nobody may touch ends it.
//
// The argument is a file of numbers (judge_cpu.py writes it). Each program runs in a forked child: all its calls, with
// two fillings of the memory that nobody wrote and with tasks in two orders, which must give the same answers; then
// with indices and positions that are wild.
#include <sanitizer/asan_interface.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <vector>

static bool backwards = false;
static char* scratch_memory = nullptr;

static void run_tasks(qc_ctx* ctx, int64_t tasks, qc_task fn, void* arg) {
    for (int64_t t = 0; t < tasks; t++) fn(arg, backwards ? tasks - 1 - t : t, ctx->scratch);
}

// Bytes at the begin and at the end of an arena that are filled and looked at: some mutants have arenas of a terabyte,
// of which they use no more than their sound program.
static const int64_t ENDS = 1 << 22;

static void fill(char* base, unsigned char value, int64_t nbytes) {
    memset(base, value, nbytes < ENDS ? nbytes : ENDS);
    if (nbytes > ENDS) memset(base + nbytes - ENDS, value, ENDS);
}

// `nbytes` of memory whose end is a multiple of `align` away from an untouchable page.
static char* place(int64_t nbytes, int64_t align) {
    const int64_t page = 4096, room = (nbytes + align - 1) / align * align;
    const int64_t pages = (room + page - 1) / page * page + page;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char* const all = (char*)mmap(nullptr, pages + 2 * page, PROT_NONE, flags, -1, 0);
    if (all == MAP_FAILED) return nullptr;
    mprotect(all + page, pages, PROT_READ | PROT_WRITE);
    char* const base = all + page + pages - room;
    __asan_poison_memory_region(all + page, base - all - page);
    __asan_poison_memory_region(base + nbytes, room - nbytes);
    return base;
}

struct arena {
    char kind;       // c(onstants) t(able of init) a(ctivations) s(tate) i(nput) o(utput)
    int64_t nbytes;
    char type;       // of an argument: f(32) d(f64) b(f16) h(f16) and integers l(64) w(32) z(16) y(8) and t(ruth)
    int64_t size;    // of one element
    std::vector<char> bytes;
};

struct call {
    int64_t entry;
    std::vector<int64_t> symbols, sizes;
};

struct program {
    int64_t number, has_init, scratch;
    std::vector<arena> arenas;
    std::vector<call> calls;
};

static uint64_t state = 1;
static uint64_t next_number() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
}

static void fill_argument(const arena& a, char* base, int64_t nbytes, bool wild) {
    for (int64_t i = 0; i + a.size <= nbytes; i += a.size) {
        const uint64_t r = next_number();
        const float far[] = {INFINITY, -INFINITY, NAN,     3e38f,    -3e38f, 1e-40f,
                             -0.0f,    9.3e18f,   -9.3e18f, 70000.0f, -1.0f};
        const float f = wild && r % 3 ? far[r / 3 % 11] : (float)((int64_t)(r % 2001) - 1000) / 500.0f;
        const double d = wild && r % 7 == 0 ? (r % 2 ? 1e300 : -1e300) : f;
        const int64_t extreme[] = {INT64_MAX, INT64_MIN, -1, 1 << 20, 7, -(int64_t)1 << 33};
        const int64_t n = wild ? extreme[r % 6] : (int64_t)(r % 2);
        uint32_t bits;
        memcpy(&bits, &f, 4);
        const uint16_t b = bits >> 16, h = wild ? r : 0x3000 | (r & 0x8fff);
        if (a.type == 'f') memcpy(base + i, &f, 4);
        else if (a.type == 'd') memcpy(base + i, &d, 8);
        else if (a.type == 'b') memcpy(base + i, &b, 2);
        else if (a.type == 'h') memcpy(base + i, &h, 2);
        else if (a.type == 't') base[i] = r % 2;
        else memcpy(base + i, &n, a.size);
    }
}

// One life of a program. Gives a digest of all results and states after every call.
static std::vector<uint64_t> live(const program& p, unsigned char filling, bool wild) {
    std::vector<uint64_t> answers;
    std::vector<char*> own(p.arenas.size());
    std::vector<char*> given(p.arenas.size());
    for (size_t i = 0; i < p.arenas.size(); i++) {
        const arena& a = p.arenas[i];
        if (a.kind == 'i' || a.kind == 'o') continue;
        own[i] = place(a.nbytes, 64);
        if (!own[i]) _exit(8);
        if (a.kind == 'c') memcpy(own[i], a.bytes.data(), a.nbytes);
        else fill(own[i], a.kind == 's' ? 0 : filling, a.nbytes);
    }
    char* const scratch = place(p.scratch, 64);
    memset(scratch, filling, p.scratch);
    qc_ctx ctx = {run_tasks, nullptr, scratch, p.scratch, 1, 0, 0, 0, -1, 0};
    if (p.has_init) {
        for (size_t i = 0; i < own.size(); i++) {
            const char kind = p.arenas[i].kind;
            given[i] = kind == 's' || kind == 'i' || kind == 'o' ? nullptr : own[i];
        }
        inits[p.number](&ctx, given.data(), nullptr);
    }
    state = 88172645463325252ull;
    for (const call& c : p.calls) {
        for (size_t i = 0; i < own.size(); i++) {
            given[i] = own[i];
            if (c.sizes[i] < 0) continue;
            given[i] = place(c.sizes[i], p.arenas[i].size);
            if (p.arenas[i].kind == 'i') fill_argument(p.arenas[i], given[i], c.sizes[i], wild);
            else memset(given[i], filling, c.sizes[i]);
        }
        ctx.error_code = 0, ctx.error_kernel = -1;
        uint64_t digest = entries[p.number][c.entry](&ctx, given.data(), c.symbols.data());
        if (!digest)
            for (size_t i = 0; i < own.size(); i++) {
                const bool out = p.arenas[i].kind == 'o' && c.sizes[i] >= 0, kept = p.arenas[i].kind == 's';
                const int64_t nbytes = out ? c.sizes[i] : p.arenas[i].nbytes;
                for (int64_t j = 0; (out || kept) && j < (nbytes < ENDS ? nbytes : ENDS); j++)
                    digest = (digest ^ (unsigned char)given[i][j]) * 1099511628211ull + 17;
            }
        answers.push_back(digest);
    }
    return answers;
}

static const char* judge(const program& p) {
    const auto first = live(p, 0x00, false);
    const auto filled = live(p, 0xa7, false);
    if (first != filled) return "another answer where memory was filled otherwise";
    backwards = true;
    if (first != live(p, 0x3c, false)) return "another answer where tasks ran in another order";
    backwards = false;
    live(p, 0x51, true);
    return "clean";
}

int main(int, char** argv) {
    std::ifstream in(argv[1]);
    int64_t count;
    in >> count;
    for (int64_t k = 0; k < count; k++) {
        program p;
        int64_t arenas, calls;
        in >> p.number >> p.has_init >> p.scratch >> arenas >> calls;
        for (int64_t i = 0; i < arenas; i++) {
            arena a;
            std::string hex;
            in >> a.kind >> a.nbytes >> a.type >> a.size;
            if (a.kind == 'c') {
                in >> hex;
                for (size_t j = 0; j + 1 < hex.size(); j += 2)
                    a.bytes.push_back((char)strtol(hex.substr(j, 2).c_str(), 0, 16));
            }
            p.arenas.push_back(a);
        }
        for (int64_t i = 0; i < calls; i++) {
            call c;
            int64_t symbols, value;
            in >> c.entry >> symbols;
            for (int64_t j = 0; j < symbols; j++) in >> value, c.symbols.push_back(value);
            c.symbols.push_back(0);
            for (int64_t j = 0; j < arenas; j++) in >> value, c.sizes.push_back(value);
            p.calls.push_back(c);
        }
        fflush(stdout);
        const pid_t child = fork();
        if (child == 0) {
            alarm(60);
            printf("@ %ld %s\n", (long)p.number, judge(p));
            fflush(stdout);
            _exit(0);
        }
        int status = 0;
        waitpid(child, &status, 0);
        if (WIFSIGNALED(status)) printf("@ %ld signal %d\n", (long)p.number, WTERMSIG(status));
        else if (WEXITSTATUS(status) == 8) printf("@ %ld not run\n", (long)p.number);
        else if (WEXITSTATUS(status)) printf("@ %ld sanitizer\n", (long)p.number);
        fflush(stdout);
    }
}
