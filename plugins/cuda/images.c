/* The images of the kernels, as nvcc has written them. */
#include "cuda/cuda_launch.h"

#define IMAGE(name)                                                                                \
    __asm__(".section .rodata\n"                                                                   \
            ".balign 64\n"                                                                         \
            ".globl td__cuda_image_" #name "\n"                                                    \
            ".hidden td__cuda_image_" #name "\n"                                                   \
            "td__cuda_image_" #name ":\n"                                                          \
            ".incbin \"" TD_CUDA_IMAGES "/" #name ".fatbin\"\n"                                    \
            ".byte 0\n"                                                                            \
            ".previous\n");                                                                        \
    extern const unsigned char td__cuda_image_##name[];

#define ENTRY(name) {#name, td__cuda_image_##name, NULL},

TD__CUDA_IMAGES(IMAGE)

struct cuda_image td__cuda_images[] = {TD__CUDA_IMAGES(ENTRY)};
