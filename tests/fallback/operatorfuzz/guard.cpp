// Memory that shows every access beyond it, for the process that preloads this library.
//
// While `guard_on(byte)` holds, each block of the C allocator lies at the end of its own pages, between pages that may
// not be touched, and is filled with `byte`.  A freed block's pages may not be touched again.  A result that depends on
// memory that nobody wrote, or on the bytes beside a block, differs between two runs with different fillings.
//
//     [no access] [filling ......... block] [filling, less than the alignment] [no access]
//
// One thread only.  Blocks are never used again: a process may guard SPACE bytes in all, and LARGEST in one block.

#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>

namespace {

constexpr size_t PAGE = 4096, SPACE = size_t(1) << 38, LARGEST = size_t(1) << 28, ALIGNMENT = 16;

char *space = nullptr, *unused = nullptr;
int filling = -1;

struct Block {
  char *first;
  size_t size, pages;
  int filling;
};
Block *blocks = nullptr;  // by the page in which a block begins

bool guarded(const void *block) { return space && block >= space && block < space + SPACE; }

Block &known(void *block) { return blocks[(static_cast<char *>(block) - space) / PAGE]; }

char *reserve(size_t bytes, int access) {
  void *found = mmap(nullptr, bytes, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return found == MAP_FAILED ? nullptr : static_cast<char *>(found);
}

void *guard(size_t size, size_t alignment) {
  if (size > LARGEST) return nullptr;
  if (!space) {
    space = reserve(SPACE, PROT_NONE);
    blocks = reinterpret_cast<Block *>(reserve(SPACE / PAGE * sizeof(Block), PROT_READ | PROT_WRITE));
    if (!space || !blocks) abort();
    unused = space + PAGE;
  }
  if (alignment < ALIGNMENT) alignment = ALIGNMENT;
  const size_t pages = (size + alignment + PAGE - 1) / PAGE;
  if (unused + (pages + 1) * PAGE > space + SPACE) return nullptr;
  char *first = unused;
  if (mprotect(first, pages * PAGE, PROT_READ | PROT_WRITE)) return nullptr;
  unused += (pages + 1) * PAGE;
  memset(first, filling, pages * PAGE);
  char *block = first + pages * PAGE - size;
  block -= reinterpret_cast<uintptr_t>(block) % alignment;
  if (block == first + pages * PAGE) block -= alignment;  // nothing has an address of its own, too
  known(block) = {first, size, pages, filling};
  return block;
}

// Ends the process if somebody wrote beside a block.
void check(char *block, const Block &is) {
  const char *end = is.first + is.pages * PAGE;
  for (const char *p = is.first; p < end; p++) {
    if (p == block) p += is.size;
    if (p < end && *p != static_cast<char>(is.filling)) {
      static const char text[] = "guard: bytes beside a block were written\n";
      (void)!write(2, text, sizeof text - 1);
      abort();
    }
  }
}

template <class F> F next(const char *name) { return reinterpret_cast<F>(dlsym(RTLD_NEXT, name)); }

}  // namespace

extern "C" {

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);
void __libc_free(void *);

// Fills the blocks from here on with `byte`; -1 ends it.
void guard_on(int byte) { filling = byte; }

void *malloc(size_t size) {
  if (filling < 0) return __libc_malloc(size);
  return guard(size, ALIGNMENT);
}

void *calloc(size_t count, size_t size) {
  if (filling < 0) return __libc_calloc(count, size);
  size_t bytes;
  if (__builtin_mul_overflow(count, size, &bytes)) return nullptr;
  void *block = guard(bytes, ALIGNMENT);
  if (block) memset(block, 0, bytes);
  return block;
}

void free(void *block) {
  if (!guarded(block)) return __libc_free(block);
  const Block &is = known(block);
  check(static_cast<char *>(block), is);
  madvise(is.first, is.pages * PAGE, MADV_DONTNEED);
  mprotect(is.first, is.pages * PAGE, PROT_NONE);
}

void *realloc(void *block, size_t size) {
  if (!block) return malloc(size);
  if (!guarded(block)) return __libc_realloc(block, size);
  const size_t before = known(block).size;
  void *found = malloc(size);
  if (found) {
    memcpy(found, block, before < size ? before : size);
    free(block);
  }
  return found;
}

int posix_memalign(void **block, size_t alignment, size_t size) {
  *block = filling < 0 ? __libc_memalign(alignment, size) : guard(size, alignment);
  return *block ? 0 : ENOMEM;
}

void *memalign(size_t alignment, size_t size) {
  return filling < 0 ? __libc_memalign(alignment, size) : guard(size, alignment);
}

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

size_t malloc_usable_size(void *block) {
  if (guarded(block)) return known(block).size;
  static auto other = next<size_t (*)(void *)>("malloc_usable_size");
  return other(block);
}

}  // extern "C"
