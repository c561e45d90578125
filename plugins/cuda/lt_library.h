/* cuBLASLt, reached when the plug-in runs. */
#ifndef LT_LIBRARY_H
#define LT_LIBRARY_H

#include <cublasLt.h>

#include <stdbool.h>

struct lt_library {
    __typeof__(&cublasLtCreate) create;
    __typeof__(&cublasLtGetVersion) get_version;
    __typeof__(&cublasLtMatmul) multiply;
    __typeof__(&cublasLtMatmulAlgoGetHeuristic) find_algorithms;
    __typeof__(&cublasLtMatmulAlgoCheck) check_algorithm;
    __typeof__(&cublasLtMatmulDescInit_internal) init_product;
    __typeof__(&cublasLtMatmulDescSetAttribute) set_product;
    __typeof__(&cublasLtMatrixLayoutInit_internal) init_layout;
    __typeof__(&cublasLtMatrixLayoutSetAttribute) set_layout;
    __typeof__(&cublasLtMatmulPreferenceInit_internal) init_preference;
    __typeof__(&cublasLtMatmulPreferenceSetAttribute) set_preference;
    cublasLtHandle_t handle;
    char name[32]; /* "cublasLt 130100", for choices.h */
};

extern struct lt_library td__lt;

/** Loads it, once, into the context of the calling thread; false: without it. */
bool td__lt_open(void);

#endif
