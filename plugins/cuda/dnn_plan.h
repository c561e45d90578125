/* Plans of cuDNN for convolutions: how a shape is described to it, and what it offers to compute it. All functions are called
 * under the lock of the handle, with the GPU's context as that of the thread. */
#ifndef DNN_PLAN_H
#define DNN_PLAN_H

#include "cuda/convolution_args.h"
#include "cuda/dnn_library.h"

enum { DNN_MOST_CONFIGS = 128, DNN_OPERANDS = 3 };

/* Which of the three convolutions. */
enum dnn_direction { DNN_Y_OF_X_W, DNN_GRAD_X_OF_Y_W, DNN_GRAD_W_OF_X_Y };

/* What a plan depends on: a key, hence without padding. */
struct dnn_shape {
    int64_t images, channels, filters, groups;
    int64_t in[2], out[2], kernel[2], stride[2], padding[2], dilation[2];
    int32_t direction, dtype, accumulate, any_order; /* the latter: sums need not have the same bits each time */
    int32_t alignment[4]; /* of x, w and y in bytes, and 0 */
};

/* What cuDNN offers for a shape: the lists of its heuristics one after the other, in each the best first, as it thinks. An
 * offer that several of them make is there once. */
struct dnn_offers {
    dnn_descriptor graph;
    dnn_descriptor configs[DNN_MOST_CONFIGS];
    uint64_t identity[DNN_MOST_CONFIGS]; /* of the engine and its knobs; 0: cuDNN does not tell */
    int count;
};

struct dnn_plan {
    dnn_descriptor plan; /* NULL: none */
    int64_t engine;
    size_t workspace;
};

/** Asks for the offers; false, with none, where the shape cannot be described. */
bool td__dnn_ask(const struct dnn_handle *handle, const struct dnn_shape *shape,
                 struct dnn_offers *offers);

/** Makes the plan of an offer; false if it is not for us: it rounds more than the dtype does, is not deterministic
 *  where it has to be, needs more
 *  than `most` bytes of workspace, or cuDNN cannot run it here after all. */
bool td__dnn_make_plan(const struct dnn_handle *handle, const struct dnn_shape *shape,
                       const struct dnn_offers *offers, int position, size_t most,
                       struct dnn_plan *plan);

void td__dnn_drop_plan(struct dnn_plan *plan);

/** Drops the offers but the one at `kept`, on which a plan is built, and which is the only one then; -1: all. */
void td__dnn_drop_offers(struct dnn_offers *offers, int kept);

/** Enqueues a plan on the stream of the handle; `operands` are x, w and y. 0, or cuDNN's status. */
int td__dnn_execute(const struct dnn_handle *handle, const struct dnn_plan *plan,
                    void *const operands[DNN_OPERANDS], void *workspace);

#endif
