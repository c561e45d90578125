/* How PyTorch trained a network, as tests/reference/record_training.py has recorded it: the lines of
 * one network, read one after another and compared with what Tandem has. The first difference fails
 * the test, and names the network, the parameter or the step, and both numbers. */
#ifndef TANDEM_TESTS_TRAINING_RECORDING_H
#define TANDEM_TESTS_TRAINING_RECORDING_H

#include <tandem/tandem.h>

struct recording;

/** Opens the recording of a network. It ends in a failed test where there is none. */
struct recording *recording_open(const char *network);
void recording_close(struct recording *recording);

/** The first weights, bit for bit. */
void recording_check_weight(struct recording *recording, const char *name, td_tensor *weight);

/** A gradient of the first step, within 1e-5 of its norm and 1e-7 of `total`, the norm of all gradients
 *  together: one that should be 0 consists of rounding, and has no digits to compare. */
void recording_check_grad(struct recording *recording, const char *name, td_tensor *grad,
                          double total);

/** The loss of the next step, within a relative 1e-4. */
void recording_check_loss(struct recording *recording, double loss);

/** A parameter after the last step, within 1e-3 of its norm. */
void recording_check_final(struct recording *recording, const char *name, td_tensor *parameter);

/** Whether the default generator has the state that PyTorch's had in the end. */
void recording_check_next(struct recording *recording);

/** The root of the sum of squares of a contiguous f32 tensor. */
double recording_norm(td_tensor *tensor);

#endif
