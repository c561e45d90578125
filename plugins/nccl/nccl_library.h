/* libnccl, as its public ABI has it: the types and functions that the backend uses, and nothing of nccl.h.
 *
 * The layout of the configuration is that of NCCL 2.14, the first version with communicators that do not block; later
 * versions take it as it is, and set what it lacks to their defaults. */
#ifndef TANDEM_NCCL_LIBRARY_H
#define TANDEM_NCCL_LIBRARY_H

#include <tandem/base.h>

#include <limits.h>

enum nccl_result {
    NCCL_OK = 0,
    NCCL_INVALID_USAGE = 5,
    NCCL_REMOTE_ERROR = 6,
    NCCL_IN_PROGRESS = 7,
};

enum nccl_type {
    NCCL_I8,
    NCCL_U8,
    NCCL_I32,
    NCCL_U32,
    NCCL_I64,
    NCCL_U64,
    NCCL_F16,
    NCCL_F32,
    NCCL_F64,
    NCCL_BF16,
};

enum nccl_op { NCCL_SUM, NCCL_PRODUCT, NCCL_MAX, NCCL_MIN, NCCL_AVG };

enum { NCCL_SCALAR_ON_HOST = 1, NCCL_ID_BYTES = 128 };

struct nccl_comm;

struct nccl_id {
    char bytes[NCCL_ID_BYTES];
};

struct nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking;
};

#define NCCL_CONFIG_MAGIC 0xcafebeefu
#define NCCL_CONFIG_VERSION 21400u

/* The functions without which there is no backend, and those that only newer versions have: NULL where they are missing.
 * Buffers are of the device, streams those of CUDA. */
#define NCCL_FUNCTIONS(X)                                                                          \
    X(ncclGetVersion, (int *version))                                                              \
    X(ncclGetUniqueId, (struct nccl_id * id))                                                      \
    X(ncclCommInitRankConfig, (struct nccl_comm * *comm, int size, struct nccl_id id, int rank,    \
                               struct nccl_config *config))                                        \
    X(ncclCommFinalize, (struct nccl_comm * comm))                                                 \
    X(ncclCommDestroy, (struct nccl_comm * comm))                                                  \
    X(ncclCommAbort, (struct nccl_comm * comm))                                                    \
    X(ncclCommGetAsyncError, (struct nccl_comm * comm, int *result))                               \
    X(ncclGroupStart, (void))                                                                      \
    X(ncclGroupEnd, (void))                                                                        \
    X(ncclRedOpCreatePreMulSum,                                                                    \
      (int *op, void *factor, int type, int residence, struct nccl_comm *comm))                    \
    X(ncclRedOpDestroy, (int op, struct nccl_comm *comm))                                          \
    X(ncclBroadcast, (const void *in, void *out, size_t count, int type, int root,                 \
                      struct nccl_comm *comm, void *stream))                                       \
    X(ncclReduce, (const void *in, void *out, size_t count, int type, int op, int root,            \
                   struct nccl_comm *comm, void *stream))                                          \
    X(ncclAllReduce, (const void *in, void *out, size_t count, int type, int op,                   \
                      struct nccl_comm *comm, void *stream))                                       \
    X(ncclAllGather,                                                                               \
      (const void *in, void *out, size_t count, int type, struct nccl_comm *comm, void *stream))   \
    X(ncclReduceScatter, (const void *in, void *out, size_t count, int type, int op,               \
                          struct nccl_comm *comm, void *stream))                                   \
    X(ncclSend,                                                                                    \
      (const void *in, size_t count, int type, int peer, struct nccl_comm *comm, void *stream))    \
    X(ncclRecv, (void *out, size_t count, int type, int peer, struct nccl_comm *comm, void *stream))

#define NCCL_NEWER_FUNCTIONS(X)                                                                    \
    X(ncclCommRevoke, (struct nccl_comm * comm, int flags))                                        \
    X(ncclAlltoAll,                                                                                \
      (const void *in, void *out, size_t count, int type, struct nccl_comm *comm, void *stream))   \
    X(ncclGather, (const void *in, void *out, size_t count, int type, int root,                    \
                   struct nccl_comm *comm, void *stream))                                          \
    X(ncclScatter, (const void *in, void *out, size_t count, int type, int root,                   \
                    struct nccl_comm *comm, void *stream))

struct nccl_library {
#define NCCL_MEMBER(name, arguments) int(*name) arguments;
    NCCL_FUNCTIONS(NCCL_MEMBER)
    NCCL_NEWER_FUNCTIONS(NCCL_MEMBER)
#undef NCCL_MEMBER
    const char *(*ncclGetErrorString)(int result);
    const char *(*ncclGetLastError)(struct nccl_comm *comm);
    char name[PATH_MAX + 32]; /* "NCCL 2.28.9 (/usr/lib/libnccl.so.2)" */

    /* Of the CUDA driver, if the process has loaded it: */
    int (*cuStreamGetCtx)(void *stream, void **context);
    int (*cuCtxSetCurrent)(void *context);
};

extern struct nccl_library nccl;

/** Loads it, once. TD_ERR_UNSUPPORTED: there is none, or it is too old; TD_ERR_INVALID: the file is not NCCL. */
td_status nccl_library_load(void);

/** Makes the device of a stream the current one of the thread, as far as CUDA is concerned. */
void nccl_use_device_of(void *stream);

/** The text of a result: "unhandled system error: …". */
const char *nccl_result_text(int result, struct nccl_comm *comm, char *text, size_t size);

#endif
