/* Helpers of layers. */
#ifndef TD_NN_LAYERS_H
#define TD_NN_LAYERS_H

#include "nn/module.h"

/** False, with the last error set, if a module got more than `most` inputs. */
bool td__takes(const td_module *module, int count, int most);

/** Fails with "<call>: the probability is …" outside of 0 to 1. */
td_status td__check_probability(const char *call, double p);

/** The initial values of linear layers and convolutions: weight [out, in, …] and bias (NULL:
 *  none). */
td_status td__init_affine(td_tensor *weight, td_tensor *bias);

/** The options of a batch norm with defaults filled in, and its features; NULL for another
 * module. */
const td_batch_norm_options *td__batch_norm_options_of(const td_module *module, int64_t *features);

/** The inputs of an attention module with the one named "mask" last. Returns their number; 0, with
 *  the last error set, for more than `most`, and for a mask beside anything but x, or query, key
 *  and value. */
int td__mask_last(const td_module *module, const td_tensor_list *inputs, td_tensor **ordered,
                  int most);

#endif
