/* Loops that are worth vector instructions.
 *
 * A function marked TD__VECTOR is compiled once for each instruction set (without extensions, with
 * AVX2 and FMA, with AVX-512), and the loader of the program chooses one for the machine. Inline
 * functions that it calls are compiled along with it. The files of such functions are named cpu_*.c
 * and built with -O3 in every kind of build (src/CMakeLists.txt). ThreadSanitizer cannot have it:
 * its own start comes after the choice. */
#ifndef TD_TENSOR_VECTOR_H
#define TD_TENSOR_VECTOR_H

#if defined(__x86_64__) && defined(__linux__) && !defined(__SANITIZE_THREAD__) &&                  \
    (defined(__clang__) ? __clang_major__ >= 14 : __GNUC__ >= 12)
#define TD__VECTOR __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define TD__VECTOR
#endif

#endif
