/* One module of each kind, and nets of several, with inputs for them; and sending one through the codec. */
#ifndef TANDEM_TESTS_MODULE_SAMPLES_H
#define TANDEM_TESTS_MODULE_SAMPLES_H

#include "rpc/codec.h"

#include <tandem/nn.h>

enum sample_input {
    IMAGE,
    DIGITS,
    ROWS,
    TOKENS,
    SEQUENCE,
    INPUTS
}; /* images of 3 channels; of 1 */

struct sample {
    const char *name;
    td_module *(*make)(void);
    enum sample_input input;
};

extern const struct sample samples[];
extern const int sample_count;

/** The convolutional net of the examples, of a kind of its own, "SampleNet", with data; the first call registers
 *  it. */
td_module *make_sample_net(void);

/** An input, which belongs to the scope. */
td_tensor *sample_input(enum sample_input input);

/** What the receiver of a module gets; NULL with the last error set. */
td_module *send_module(td_module *module);

/** Encodes a packed module with copies of its tensors, decodes it, and makes the module of it. */
td_module *send_packed(const td_value *packed);

#endif
