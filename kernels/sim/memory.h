// Device memory and its shadow.
//
// A device is one reserved range of addresses: which device a pointer belongs to can be read off the pointer.
// Allocations lie in it with red zones around them. Beside each allocation, and beside each resident block's shared
// memory, lies a shadow: one Cell for each four bytes (four more, one per byte, for words whose bytes have different
// histories) and, for allocations, one bit per byte that says whether it was ever given a value. The pages of a shadow
// exist once they are touched, and memory that a launch only reads never touches its cells.
#pragma once
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace qs {

constexpr uint64_t REGION_BYTES = 1ull << 36;  // addresses, not memory
constexpr uint64_t RED_ZONE = 256;
constexpr unsigned char RED_ZONE_BYTE = 0xa5;

// When and by whom: block serial (32 bits, grows over the life of the process) | time in the block (21) | thread (10) |
// atomic (1). Serials and times only grow, so a shadow is never cleared.
typedef uint64_t Stamp;
constexpr int TIME_SHIFT = 11, SERIAL_SHIFT = 32;
constexpr uint32_t TIME_LIMIT = 1u << 21;
inline uint32_t serial_of(Stamp s) { return (uint32_t)(s >> SERIAL_SHIFT); }
inline uint32_t time_of(Stamp s) { return (uint32_t)(s >> TIME_SHIFT) & (TIME_LIMIT - 1); }
inline uint32_t thread_of(Stamp s) { return (uint32_t)(s >> 1) & 1023; }

enum Readers : uint8_t { ONE_THREAD, ONE_WARP, ONE_BLOCK, MANY_BLOCKS };

enum : uint8_t { WHOLE, SPLIT, RANGE_END };

struct Cell {
    Stamp written;        // the last write
    Stamp read;           // the latest read since; 0 for none
    uint32_t read_lanes;  // for ONE_WARP: which lanes have read
    uint8_t readers;
    // SPLIT: the four byte cells hold the histories; RANGE_END: likewise, and a range ends in the word
    uint8_t split;
    uint8_t pending;      // a cp.async writes here and no wait has covered it
    uint8_t range;        // shared memory: index of the declared range + 1, 0 for red zones
};
static_assert(sizeof(Cell) == 24, "the shadow is six times the memory it stands for");

template <class T> T* map_zeroed(uint64_t count) {
    void* p = mmap(nullptr, std::max<uint64_t>(count * sizeof(T), 1), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : (T*)p;
}

struct Shadow {
    uintptr_t base = 0;
    uint64_t nbytes = 0;
    Cell* words = nullptr;
    Cell* bytes = nullptr;
    uint64_t* initialised = nullptr;  // one bit per byte; allocations only

    bool map(uintptr_t at, uint64_t size, bool with_bits) {
        base = at, nbytes = size;
        words = map_zeroed<Cell>(size / 4 + 4);
        bytes = map_zeroed<Cell>(size + 16);
        if (with_bits) initialised = map_zeroed<uint64_t>(size / 64 + 2);
        return words && bytes && (initialised || !with_bits);
    }
    void unmap() {
        if (words) munmap(words, (nbytes / 4 + 4) * sizeof(Cell));
        if (bytes) munmap(bytes, (nbytes + 16) * sizeof(Cell));
        if (initialised) munmap(initialised, (nbytes / 64 + 2) * sizeof(uint64_t));
        words = bytes = nullptr, initialised = nullptr;
    }
    void forget_history() {  // fresh zero pages
        madvise(words, (nbytes / 4 + 4) * sizeof(Cell), MADV_DONTNEED);
        madvise(bytes, (nbytes + 16) * sizeof(Cell), MADV_DONTNEED);
    }
    void mark_initialised(uintptr_t at, uint64_t size) {
        for (uint64_t i = at - base, end = i + size; i < end;) {
            const uint64_t word = i / 64, from = i % 64, count = std::min<uint64_t>(64 - from, end - i);
            initialised[word] |= (count == 64 ? ~0ull : (1ull << count) - 1) << from;
            i += count;
        }
    }
    // The first byte of a range that has no value, or its end.
    uintptr_t first_uninitialised(uintptr_t at, uint64_t size) const {
        for (uint64_t i = at - base, end = i + size; i < end;) {
            const uint64_t word = i / 64, from = i % 64, count = std::min<uint64_t>(64 - from, end - i);
            const uint64_t want = (count == 64 ? ~0ull : (1ull << count) - 1) << from;
            const uint64_t missing = want & ~initialised[word];
            if (missing) return base + word * 64 + (uint64_t)__builtin_ctzll(missing);
            i += count;
        }
        return at + size;
    }
};

struct Allocation {
    int device;
    uintptr_t base;
    uint64_t nbytes;
    std::string label;
    Shadow shadow;
};

struct Device {
    uintptr_t base = 0;
    uintptr_t used = 0;                         // bytes of the region that were ever handed out
    std::map<uintptr_t, uint64_t> free_blocks;  // base -> bytes, neighbours merged
};

class Memory {
  public:
    std::map<int, Device> devices;
    std::map<uintptr_t, std::unique_ptr<Allocation>> allocations;

    bool reserve(int number) {
        if (devices.count(number)) return true;
        void* p = mmap(nullptr, REGION_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) return false;
        devices[number].base = (uintptr_t)p;
        return true;
    }

    // 0 where there is no room. The bytes are zero, but count as uninitialised.
    uintptr_t allocate(int number, uint64_t nbytes, const char* label) {
        if (!reserve(number) || nbytes > REGION_BYTES / 2) return 0;
        Device& device = devices[number];
        const uint64_t room = (std::max<uint64_t>(nbytes, 1) + 255) / 256 * 256 + 2 * RED_ZONE;
        uintptr_t block = 0;
        for (auto it = device.free_blocks.begin(); it != device.free_blocks.end(); ++it) {
            if (it->second < room) continue;
            block = it->first;
            if (it->second > room) device.free_blocks[block + room] = it->second - room;
            device.free_blocks.erase(block);
            clear(block, room);
            break;
        }
        if (!block) {
            if (device.used + room > REGION_BYTES) return 0;
            block = device.base + device.used;
            const uintptr_t first = block & ~(uintptr_t)4095, last = (block + room + 4095) & ~(uintptr_t)4095;
            if (mprotect((void*)first, last - first, PROT_READ | PROT_WRITE)) return 0;
            device.used += room;
        }
        auto made = std::make_unique<Allocation>();
        made->device = number, made->base = block + RED_ZONE, made->nbytes = nbytes, made->label = label;
        if (!made->shadow.map(made->base, nbytes, true)) return 0;
        memset((void*)block, RED_ZONE_BYTE, RED_ZONE);
        memset((void*)(made->base + nbytes), RED_ZONE_BYTE, block + room - made->base - nbytes);
        const uintptr_t base = made->base;
        allocations[base] = std::move(made);
        return base;
    }

    // Zeros. Whole pages become fresh ones: a large allocation takes memory only where it is touched.
    static void clear(uintptr_t block, uint64_t room) {
        const uintptr_t end = block + room, first = (block + 4095) & ~(uintptr_t)4095, last = end & ~(uintptr_t)4095;
        if (first >= last || madvise((void*)first, last - first, MADV_DONTNEED)) {
            memset((void*)block, 0, room);
            return;
        }
        memset((void*)block, 0, first - block);
        memset((void*)last, 0, end - last);
    }

    bool release(uintptr_t base) {
        const auto it = allocations.find(base);
        if (it == allocations.end()) return false;
        Device& device = devices[it->second->device];
        const uint64_t room = (std::max<uint64_t>(it->second->nbytes, 1) + 255) / 256 * 256 + 2 * RED_ZONE;
        uintptr_t block = base - RED_ZONE;
        uint64_t size = room;
        it->second->shadow.unmap();
        allocations.erase(it);
        const uintptr_t first = (block + 4095) & ~(uintptr_t)4095, last = (block + room) & ~(uintptr_t)4095;
        if (first < last) madvise((void*)first, last - first, MADV_DONTNEED);
        auto next = device.free_blocks.lower_bound(block);
        if (next != device.free_blocks.end() && block + size == next->first) {
            size += next->second;
            next = device.free_blocks.erase(next);
        }
        if (next != device.free_blocks.begin()) {
            const auto before = std::prev(next);
            if (before->first + before->second == block) {
                before->second += size;
                return true;
            }
        }
        device.free_blocks[block] = size;
        return true;
    }

    Allocation* allocation_of(uintptr_t address) const {
        auto it = allocations.upper_bound(address);
        if (it == allocations.begin()) return nullptr;
        Allocation* found = std::prev(it)->second.get();
        return address < found->base + std::max<uint64_t>(found->nbytes, 1) ? found : nullptr;
    }
    int device_of(uintptr_t address) const {
        for (const auto& [number, device] : devices)
            if (address - device.base < REGION_BYTES) return number;
        return -1;
    }
};

}  // namespace qs
