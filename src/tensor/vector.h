/* Vectorised loops.
 *
 * A function marked TD__VECTOR is compiled once for each instruction set (without extensions, with AVX2 and
 * FMA, with AVX-512), and the dynamic loader chooses one for the machine (ifunc). Inline functions that it
 * calls are compiled along with it. The files of such functions are named cpu_*.c and built with -O3 in
 * every preset (src/CMakeLists.txt). Not with ThreadSanitizer, which starts after the choice, nor with clang
 * before 17, which names such a function differently from what callers in other files expect.
 *
 * TD__VECTOR_256 is for loops that hardly compute: vectors of 64 bytes move arrays that are not in L1 more
 * slowly than vectors of 32 (by 6 % on a Zen 4). */
#ifndef TD_TENSOR_VECTOR_H
#define TD_TENSOR_VECTOR_H

#if defined(__x86_64__) && defined(__linux__) && !defined(__SANITIZE_THREAD__) &&                  \
    (defined(__clang__) ? __clang_major__ >= 17 : __GNUC__ >= 12)
#define TD__VECTOR __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#define TD__VECTOR_256 __attribute__((target_clones("default", "arch=x86-64-v3")))
#else
#define TD__VECTOR
#define TD__VECTOR_256
#endif

/** For small functions that are to be compiled along with the TD__VECTOR function that calls them. */
#define TD__INLINE static inline __attribute__((always_inline))

/* Before a loop over arrays of which one may be the result itself: no iteration reads what another
 * one has written. */
#if defined(__clang__)
#define TD__INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define TD__INDEPENDENT _Pragma("GCC ivdep")
#endif

#endif
