/* The kinds of devices, one line each. */
#include "doctor.h"

#include "base/text.h"
#include "device/device_internal.h"

#include <tandem/plugin.h>

#include <string.h>

enum { TEXT = 1024 };

/* Plug-ins register their kinds when they are loaded. `tdrun doctor` says which of them cannot be loaded. */
static void load_plugins(void)
{
    td_plugin_info *plugins;
    int count;
    if (!td_list_plugins(true, &plugins, &count))
        td_free_plugin_list(plugins);
}

/* TD_OK, or why devices of the kind cannot be used. */
static td_status describe(const char *name, char text[TEXT])
{
    struct td__device_kind *kind = td__find_kind(name);
    text[0] = '\0';
    if (!strcmp(name, "cpu")) {
        td__text_add(text, TEXT, "the host, and %d numbered devices on it", td_device_count(name));
        return TD_OK;
    }
    int count = kind ? kind->ops.count(kind->arg) : -1;
    if (count < 0) {
        td__text_add(text, TEXT, "cannot be used: %s", td_last_error());
        return td_last_status();
    }
    char line[512] = "";
    bool described = kind->ops.describe && !kind->ops.describe(kind->arg, line, sizeof line);
    td__text_add(text, TEXT, "%d device%s%s%s", count, count == 1 ? "" : "s",
                 described && *line ? "; " : "", described ? line : "");
    return TD_OK;
}

void device_list(void (*visit)(const struct device_line *line, void *arg), void *arg)
{
    char names[TD__KINDS_MOST * (TD__KIND_NAME + 2)] = "", text[TEXT], *rest;
    load_plugins();
    td__kind_names(names, sizeof names);
    for (char *name = strtok_r(names, ", ", &rest); name; name = strtok_r(NULL, ", ", &rest)) {
        td_status status = describe(name, text);
        visit(&(struct device_line){.kind = name,
                                    .text = text,
                                    .broken = status && status != TD_ERR_UNSUPPORTED,
                                    .absent = status == TD_ERR_UNSUPPORTED},
              arg);
    }
}
