/* A module as text, in the form of PyTorch's repr():
 *
 *     Sequential(
 *       (0): Linear(in_features=4, out_features=2, bias=True)
 *       (1): ReLU()
 *     )                                                                                            */
#include "nn/module.h"

#include "base/buffer.h"
#include "base/fail.h"

#include <stdlib.h>
#include <string.h>

static void put(struct td__buffer *text, const char *part)
{
    td__buffer_put(text, part, strlen(part));
}

static void put_line(struct td__buffer *text, int depth)
{
    put(text, "\n");
    for (int i = 0; i < depth; i++)
        put(text, "  ");
}

/* Appends what ops->describe() writes, each line of it indented. */
static void put_description(struct td__buffer *text, const td_module *module, int depth)
{
    if (!module->ops->describe)
        return;
    char few[256], *words = few;
    int size = module->ops->describe(module, few, sizeof few);
    if (size >= (int)sizeof few) {
        words = malloc((size_t)size + 1);
        size = words ? module->ops->describe(module, words, (size_t)size + 1) : 0;
        text->failed |= !words;
    }
    for (int i = 0; i < size; i++)
        if (words[i] == '\n')
            put_line(text, depth);
        else
            td__buffer_put_u8(text, (uint8_t)words[i]);
    if (words != few)
        free(words);
}

static void put_module(struct td__buffer *text, const td_module *module, int depth)
{
    put(text, module->ops->name);
    put(text, "(");
    size_t before = text->size;
    if (module->child_count)
        put_line(text, depth + 1);
    size_t line = text->size;
    put_description(text, module, depth);
    if (module->child_count && text->size == line)
        text->size = before; /* nothing to describe: no line */
    for (int i = 0; i < module->child_count; i++) {
        put_line(text, depth + 1);
        put(text, "(");
        put(text, module->children[i].name);
        put(text, "): ");
        put_module(text, module->children[i].module, depth + 1);
    }
    if (module->child_count)
        put_line(text, depth);
    put(text, ")");
}

td_bytes td_module_text(const td_module *module)
{
    struct td__buffer text = {0};
    if (module)
        put_module(&text, module, 0);
    else
        put(&text, "NULL");
    td__buffer_put_u8(&text, 0);
    if (text.failed) {
        td__buffer_free(&text);
        td__fail_nomem("td_module_text");
        return (td_bytes){0};
    }
    return (td_bytes){.data = (char *)text.data, .size = text.size - 1};
}

td_status td_module_print(const td_module *module, FILE *file)
{
    td_bytes text = td_module_text(module);
    if (!text.data)
        return TD_ERR_NOMEM;
    bool written = file && fprintf(file, "%s\n", text.data) >= 0;
    td_bytes_free(&text);
    return written ? TD_OK
                   : td_fail(TD_ERR_SYSTEM, "td_module_print: the file cannot be written to");
}
