/* Sizes of the kernels in flash_attention.cu and flash_attention_grad.cu, which take struct attention_args. W is the width
 * of rows that a kernel is compiled for: narrower ones are filled up with zeros. */
#ifndef FLASH_ATTENTION_ARGS_H
#define FLASH_ATTENTION_ARGS_H

#include "cuda/attention_args.h"

enum {
    FLASH_THREADS = 128,    /* of a block: 4 warps, each with its rows of the block's own tile */
    FLASH_PAD = 8,          /* elements after each row of a tile: 8 rows lie in different banks */
    FLASH_QUERIES = 128,    /* of a block, of the result and of grad_q */
    FLASH_KEYS = 64,        /* of a tile that it reads for the result */
    FLASH_GRAD_QUERIES = 64 /* of a tile that is read for grad_k and grad_v */
};

/* Keys of a tile that is read for grad_q: with more, two blocks would not fit on a multiprocessor. */
#define FLASH_GRAD_KEYS(W) ((W) <= 64 ? 64 : 32)
/* Keys of a block, of grad_k and grad_v: a warp has as many sums as there are registers for. */
#define FLASH_OWN_KEYS(W) ((W) <= 64 ? 128 : 64)

/* Bytes of shared memory: `own` rows that stay, and two stages of two tiles of `read` rows; with lse and delta. */
#define FLASH_SHARED(W, own, read)                                                                 \
    (((own) + 4 * (read)) * ((W) + FLASH_PAD) * 2 + 4 * (read) * (int)sizeof(float))

#endif
