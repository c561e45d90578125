/* The parts of the program gpt2, each a file: the model (gpt2_model.c), the peak of devices (gpt2_speed.c), the command line
 * (gpt2_options.c) and text of tokens (gpt2_text.c); gpt2.c trains. */
#ifndef TANDEM_EXAMPLES_GPT2_H
#define TANDEM_EXAMPLES_GPT2_H

#include <tandem/tandem.h>

/* ---- The model ------------------------------------------------------------------------------------ */

struct gpt2_config {
    int64_t layers, heads, width, context, vocabulary;
    double dropout;
};

/** "124M", "350M", "774M", "1.5B", or Hugging Face's names ("gpt2-medium"); NULL for others. */
const struct gpt2_config *gpt2_size(const char *name);

/** A model with the initial values of the paper, on the current device. Inputs: tokens [N, L] for logits
 *  [N, L, vocabulary]; tokens and targets [N, L] for the mean loss. */
td_module *gpt2_create(const struct gpt2_config *config);

/** The weights of a file of Hugging Face's, with the names and layouts of gpt2_create(): for td_module_load_state(). */
td_state *gpt2_read_weights(const char *path);

/** The sizes of the model that has these weights. `heads` is width / 64, as in all models of OpenAI's. */
td_status gpt2_config_of(const td_state *weights, struct gpt2_config *config);

/** Writes a file as Hugging Face has it. */
td_status gpt2_save_weights(const char *path, td_module *gpt2);

/** Floating-point operations of a forward and a backward pass, for each token of a whole context. */
double gpt2_flops_per_token(td_module *gpt2, const struct gpt2_config *config);

/** AdamW, with beta2 0.95; only matrices decay, biases and the weights of norms do not. */
td_optimizer *gpt2_adamw(td_module *gpt2, double lr, double weight_decay);

/* ---- Speed ---------------------------------------------------------------------------------------- */

/** FLOP/s of products of large matrices on a device: measured; and as data sheets have it, of a name ("h200") or a
 *  number of TFLOP/s. 0 on failure, and for another text. */
double gpt2_measure_peak(td_device *device, bool bf16);
double gpt2_known_peak(const char *text, bool bf16);

/* ---- The command line ----------------------------------------------------------------------------- */

struct gpt2_settings {
    /* the model */
    const char *size, *from;
    int64_t layers, heads, width, context, vocabulary;
    double dropout;
    /* the data */
    const char *data, *tokens;
    /* training */
    const char *device;
    bool bf16, graph;
    /* sharding */
    bool fsdp, no_shared_memory;
    const char *strategy;
    int64_t batch, accumulate, steps, warmup, seed;
    double lr, min_lr, weight_decay, clip;
    /* what comes out */
    const char *out, *save, *peak;
    int64_t save_every, log_every, memory;
    bool resume;
    /* text */
    int64_t generate, top_k;
    double temperature;
    const char *prompt, *vocabulary_file;
};

/** Reads the command line. True: go on. Otherwise *code is that of the program, which has printed why, or its help. */
bool gpt2_read_settings(int argc, char **argv, struct gpt2_settings *settings, int *code);

/** The td_fsdp_strategy of a name; -1 for others. */
int gpt2_strategy(const char *name);

/* ---- Text ----------------------------------------------------------------------------------------- */

/** The texts of tokens; without a file (NULL), tokens below 256 are bytes. */
struct gpt2_vocabulary {
    td_bytes *texts; /* of each token; NULL: bytes */
    int64_t count;
};

/** Reads Hugging Face's vocab.json. */
td_status gpt2_read_vocabulary(const char *path, struct gpt2_vocabulary *vocabulary);
void gpt2_free_vocabulary(struct gpt2_vocabulary *vocabulary);

/** Continues the prompt, and prints it token by token. With bytes the prompt is text, otherwise numbers of tokens. */
td_status gpt2_generate(td_module *gpt2, const struct gpt2_config *config,
                        const struct gpt2_settings *settings, td_device *device, bool bytes);

#endif
