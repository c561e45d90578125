/* What layers share. */
#ifndef TD_NN_LAYERS_H
#define TD_NN_LAYERS_H

#include "nn/module.h"

/** Whether a module was given no more inputs than `most`; otherwise the last error is set. */
bool td__takes(const td_module *module, int count, int most);

/** Fails with "<call>: the probability is …" outside of 0 to 1. */
td_status td__check_probability(const char *call, double p);

/** Draws the initial values of a weight [out, in, …], and of a bias (NULL: none), as linear layers and
 *  convolutions have them. */
td_status td__init_affine(td_tensor *weight, td_tensor *bias);

/** What a batch norm was made with, defaults filled in, and its features; NULL for another module. */
const td_batch_norm_options *td__batch_norm_options_of(const td_module *module, int64_t *features);

/** The inputs of a module with attention: those without the name "mask" in order, and behind them the
 *  one that has it. Returns their number; 0 with the last error for more than `most`, and for a mask
 *  beside anything but x, or query, key and value. */
int td__mask_last(const td_module *module, const td_tensor_list *inputs, td_tensor **ordered,
                  int most);

#endif
