/* The expanded wrappers of library functions: no policy here. What each one documents follows from library_api.def and
 * gen_library.py.
 *
 * What callers reach is a few instructions of assembler: a test of the gate's word and a jump, which leave the caller's
 * return address and every argument where they are. A compiler would do that for arguments in registers only, and a
 * matrix multiplication has eight more. */
#include "library.h"
#include "library_notes.h"
#include "library_sizes.h"

#define DEFAULT __attribute__((visibility("default")))
#define HIDDEN __attribute__((visibility("hidden")))
/* Named in assembler only: the compiler must neither drop nor clone it. */
#define SLOW static __attribute__((noinline, used))

_Static_assert(offsetof(struct phos_library_entry, target) == 0 && sizeof(struct phos_library_entry) == 40,
               "HOOK_JUMPS computes the address of an entry's target");
_Static_assert(PHOS_GATE_TRACED == 1 << 4, "HOOK_JUMPS tests bit 4");

#if defined(__x86_64__)
#define LANDING "endbr64\n"
#define HOOK_JUMPS(name, index) \
    "testb $16, phos_gate_word(%rip)\n" \
    "jne slow_" #name "\n" \
    "jmp *phos_library_entries+40*" #index "(%rip)\n"
#define ALWAYS_JUMPS(name, index) "jmp slow_" #name "\n"
#elif defined(__aarch64__)
#define LANDING "hint #34\n"
#define HOOK_JUMPS(name, index) \
    "adrp x16, phos_gate_word\n" \
    "ldr w16, [x16, :lo12:phos_gate_word]\n" \
    "tbnz w16, #4, 1f\n" \
    "adrp x16, phos_library_entries+40*" #index "\n" \
    "ldr x16, [x16, :lo12:phos_library_entries+40*" #index "]\n" \
    "br x16\n" \
    "1: b slow_" #name "\n"
#define ALWAYS_JUMPS(name, index) "b slow_" #name "\n"
#else
#error "the wrappers of library functions have no code for this machine"
#endif

#define WRAPPER(name, visibility, jumps) \
    __asm__(".pushsection .text\n" \
            ".p2align 4\n" \
            ".globl hook_" #name "\n" visibility ".type hook_" #name ", %function\n" \
            "hook_" #name ":\n" LANDING jumps ".size hook_" #name ", .-hook_" #name "\n" \
            ".popsection")
/* libphos.map makes the name itself local: only the one with a version is exported. */
#define VERSIONED(name, version) ".symver hook_" #name ", " version "\n"
#define LOCAL(name) ".hidden hook_" #name "\n"

#define HOOK_LINKED(name, index, version) WRAPPER(name, VERSIONED(name, version), HOOK_JUMPS(name, index))
#define HOOK_LOCAL(name, index) WRAPPER(name, LOCAL(name), HOOK_JUMPS(name, index))
#define ALWAYS_LINKED(name, index, version) WRAPPER(name, VERSIONED(name, version), ALWAYS_JUMPS(name, index))
#define ALWAYS_LOCAL(name, index) WRAPPER(name, LOCAL(name), ALWAYS_JUMPS(name, index))

#include "phos_library_hooks.inc"
