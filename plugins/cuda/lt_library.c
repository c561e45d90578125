/* cuBLASLt; see lt_library.h. */
#include "cuda/lt_library.h"
#include "cuda/cuda_library.h"

#include <pthread.h>
#include <stdio.h>

struct lt_library td__lt;

static pthread_once_t once = PTHREAD_ONCE_INIT;

static void open_library(void)
{
    static const char *const names[] = {"libcublasLt.so.13", "libcublasLt.so.12",
                                        "/usr/local/cuda/lib64/libcublasLt.so.13",
                                        "/usr/local/cuda/lib64/libcublasLt.so.12", NULL};
    struct lt_library *lt = &td__lt;
    const struct cuda_symbol symbols[] = {
        {"cublasLtCreate", (void **)&lt->create},
        {"cublasLtGetVersion", (void **)&lt->get_version},
        {"cublasLtMatmul", (void **)&lt->multiply},
        {"cublasLtMatmulAlgoGetHeuristic", (void **)&lt->find_algorithms},
        {"cublasLtMatmulAlgoCheck", (void **)&lt->check_algorithm},
        {"cublasLtMatmulDescInit_internal", (void **)&lt->init_product},
        {"cublasLtMatmulDescSetAttribute", (void **)&lt->set_product},
        {"cublasLtMatrixLayoutInit_internal", (void **)&lt->init_layout},
        {"cublasLtMatrixLayoutSetAttribute", (void **)&lt->set_layout},
        {"cublasLtMatmulPreferenceInit_internal", (void **)&lt->init_preference},
        {"cublasLtMatmulPreferenceSetAttribute", (void **)&lt->set_preference},
    };
    if (!td__cuda_open("cuBLASLt", "TANDEM_CUBLASLT_SO", names, symbols,
                       (int)(sizeof symbols / sizeof symbols[0])))
        return;
    snprintf(lt->name, sizeof lt->name, "cublasLt %zu", lt->get_version());
    cublasStatus_t status = lt->create(&lt->handle);
    if (status) {
        td_log(TD_LOG_WARN, "cuda: without cuBLASLt, which fails to start with status %d",
               (int)status);
        lt->handle = NULL;
    }
}

bool td__lt_open(void)
{
    pthread_once(&once, open_library);
    return td__lt.handle;
}
