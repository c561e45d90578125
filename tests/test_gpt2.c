/* The model of examples/gpt2: PyTorch's logits and losses from a file of Hugging Face's, on the host and on the toy
 * accelerator; files; and the texts of tokens. The program itself is tested by launch/test_gpt2.py. */
#include "../examples/gpt2.h"
#include "reference/gpt2_vectors.h"
#include "runner.h"
#include "toy_device.h"

#include <math.h>
#include <string.h>
#include <unistd.h>

static td_device *host(void)
{
    return td_device_get("cpu");
}

static td_device *toy(void)
{
    CHECK_OK(toy_register());
    toy_set_delay(20);
    return td_device_get("toy:0");
}

/* The recorded model, on a device. */
static td_module *read_model(const char *path, td_device *device)
{
    struct gpt2_config config;
    td_state *weights = gpt2_read_weights(path);
    if (!weights)
        FAIL("%s", td_last_error());
    CHECK_OK(gpt2_config_of(weights, &config));
    CHECK_EQ(config.layers, 2);
    CHECK_EQ(config.width, 24);
    CHECK_EQ(config.context, 16);
    CHECK_EQ(config.vocabulary, 32);
    CHECK_EQ(config.heads, 1); /* of 64; ours are smaller */
    config.heads = GPT2_HEADS;
    TD_DEVICE_SCOPE(device);
    td_module *gpt2 = gpt2_create(&config);
    CHECK_OK(td_module_load_state(gpt2, weights, true));
    td_state_destroy(weights);
    return gpt2;
}

static td_tensor *batch_of(const int64_t *numbers, td_device *device)
{
    td_tensor *here = td_from_array(numbers, TD_SHAPE(GPT2_BATCH, GPT2_LENGTH), TD_I64, host());
    return td_tensor_to(here, device);
}

static void check_close(double found, double expected, double tolerance)
{
    if (!(fabs(found - expected) <= tolerance * (1 + fabs(expected))))
        FAIL("%.9g instead of %.9g", found, expected);
}

static void check_logits(td_module *gpt2, td_device *device)
{
    TD_SCOPE;
    td_tensor *logits = td_forward(gpt2, batch_of(gpt2_tokens, device));
    logits = td_contiguous(td_tensor_to(logits, host()));
    CHECK_EQ(td_tensor_numel(logits), (int64_t)(sizeof gpt2_logits / sizeof(float)));
    const float *found = td_tensor_data(logits);
    for (int64_t i = 0; i < td_tensor_numel(logits); i++)
        check_close((double)found[i], (double)gpt2_logits[i], 1e-5);
}

/* Logits, and the losses of some steps. */
static void check_training(td_device *device)
{
    td_module *gpt2 = read_model(TD_GPT2_FILE, device);
    check_logits(gpt2, device);
    td_optimizer *adamw = gpt2_adamw(gpt2, 0.01, 0.1);
    CHECK_EQ(td_optimizer_group_count(adamw), 2);
    for (int step = 0; step < GPT2_STEPS; step++) {
        TD_SCOPE;
        CHECK_OK(td_optimizer_zero_grad(adamw));
        td_tensor *loss = td_forward_with(
            gpt2, TD_TENSORS(batch_of(gpt2_tokens, device), batch_of(gpt2_targets, device)));
        CHECK_OK(td_backward(loss));
        CHECK_OK(td_clip_grad_norm_(gpt2, 1, NULL, NULL));
        CHECK_OK(td_optimizer_step(adamw));
        check_close(td_item(loss), (double)gpt2_losses[step], 2e-5);
    }
    td_optimizer_destroy(adamw);
    td_module_destroy(gpt2);
}

TEST(logits_and_losses_are_pytorchs)
{
    check_training(host());
}

TEST(logits_and_losses_are_pytorchs_on_an_accelerator)
{
    check_training(toy());
}

/* A saved file has Hugging Face's layout, without the prefix, and the same logits. */
TEST(saved_weights)
{
    td_module *gpt2 = read_model(TD_GPT2_FILE, host()), *again;
    char path[64];
    snprintf(path, sizeof path, "/tmp/td-test-gpt2-%d.safetensors", (int)getpid());
    CHECK_OK(gpt2_save_weights(path, gpt2));
    td_state *file = td_load_safetensors(path, NULL);
    CHECK_EQ(td_state_count(file), 2 + 2 * 12 + 2);
    CHECK_EQ(td_tensor_size(td_state_get(file, "h.1.attn.c_attn.weight"), 0), 24);
    CHECK_EQ(td_tensor_size(td_state_get(file, "h.1.attn.c_attn.weight"), 1), 72);
    CHECK_EQ(td_tensor_size(td_state_get(file, "h.0.mlp.c_proj.weight"), 0), 96);
    CHECK_EQ(td_tensor_size(td_state_get(file, "wte.weight"), 0), 32);
    td_state_destroy(file);
    again = read_model(path, host());
    unlink(path);
    check_logits(again, host());
    td_module_destroy(again);
    td_module_destroy(gpt2);
}

TEST(sizes)
{
    struct gpt2_config small = *gpt2_size("124M");
    CHECK(gpt2_size("gpt2-xl") == gpt2_size("1.5B") && !gpt2_size("125M"));
    small.layers = 1;
    td_module *gpt2 = gpt2_create(&small);
    /* wte, wpe, ln_f, and a block: 12 matrices of 768 x 768, and 13 vectors */
    int64_t tables = (50257 + 1024 + 2) * 768, block = 12 * 768 * 768 + 13 * 768;
    CHECK_EQ(td_module_parameter_count(gpt2), tables + block);
    check_close(gpt2_flops_per_token(gpt2, &small),
                6.0 * (double)(tables + block - 1024 * 768) + 12.0 * 768 * 1024, 0);
    td_module_destroy(gpt2);
    small.heads = 5;
    CHECK(!gpt2_create(&small));
    CHECK_CONTAINS(td_last_error(), "768, must be a multiple of the heads, 5");
}

TEST(a_sequence_is_too_long)
{
    td_module *gpt2 = read_model(TD_GPT2_FILE, host());
    TD_SCOPE;
    CHECK(!td_forward(gpt2, td_zeros(TD_SHAPE(1, 17), TD_I64, NULL)));
    CHECK_CONTAINS(td_last_error(), "17 tokens; the context has 16");
    td_module_destroy(gpt2);
}

TEST(other_files_are_refused)
{
    struct gpt2_config config;
    td_state *other = td_state_create();
    CHECK_FAILS(gpt2_config_of(other, &config), TD_ERR_INVALID, "there is no GPT-2 in the file");
    td_state_destroy(other);
    CHECK(!gpt2_read_weights("/nowhere/model.safetensors"));
    CHECK_CONTAINS(td_last_error(), "/nowhere/model.safetensors");
}

/* ---- The texts of tokens ------------------------------------------------------------------------------ */

static td_status read_vocabulary(const char *json, struct gpt2_vocabulary *vocabulary)
{
    char path[64];
    snprintf(path, sizeof path, "/tmp/td-test-gpt2-%d.json", (int)getpid());
    FILE *file = fopen(path, "w");
    CHECK(file && fputs(json, file) >= 0 && !fclose(file));
    td_status status = gpt2_read_vocabulary(path, vocabulary);
    unlink(path);
    return status;
}

static void check_text(const struct gpt2_vocabulary *vocabulary, int token, const char *text)
{
    CHECK(token < vocabulary->count);
    CHECK_EQ(vocabulary->texts[token].size, strlen(text));
    CHECK_MEM(vocabulary->texts[token].data, text, strlen(text));
}

TEST(vocabulary)
{
    struct gpt2_vocabulary vocabulary;
    /* \u0120 is a space, \u010a a newline, \u00c3\u00a9 the bytes of e with an acute accent in UTF-8; in any order */
    CHECK_OK(read_vocabulary("{\"!\": 0, \"\\u0120the\": 3, \"\\\"\": 1 ,\"\u010aa\":4,\n"
                             " \"caf\\u00c3\\u00a9\": 5, \"\\\\\": 6, \"\u0143\": 7}",
                             &vocabulary));
    check_text(&vocabulary, 0, "!");
    check_text(&vocabulary, 1, "\"");
    check_text(&vocabulary, 3, " the");
    check_text(&vocabulary, 4, "\na");
    check_text(&vocabulary, 5, "caf\xc3\xa9");
    check_text(&vocabulary, 6, "\\");
    check_text(&vocabulary, 7, "\xad");
    CHECK_EQ(vocabulary.texts[2].size, 0);
    gpt2_free_vocabulary(&vocabulary);

    static const char *const wrong[] = {"",           "[]",          "{\"a\": 1",    "{\"a\" 1}",
                                        "{\"a\": x}", "{\"a\": -1}", "{\"\\n\": 1}", "{\"a\": 1,}"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        CHECK(read_vocabulary(wrong[i], &vocabulary) != TD_OK && !vocabulary.texts);
}
