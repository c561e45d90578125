/* Which modules are units, and which parameters they have. */
#include "base/fail.h"
#include "parallel/fsdp_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A module of the tree, with what is decided about it. */
struct place {
    td_module *module;
    char *name;
    int parent;   /* -1: the outermost */
    bool ignored; /* it, or a module around it */
    bool is_unit;
    bool is_adopted; /* a former call made it a unit */
    struct td__fsdp_unit *unit;
    int64_t numel; /* of parameters in no inner unit */
};

struct tree {
    struct place *at;
    int count, capacity;
    const td_fsdp_options *options;
    td_tensor **ignored; /* parameters */
    int ignored_count, ignored_capacity;
};

/* ---- The modules ------------------------------------------------------------------------------------------ */

static char *join(const char *a, const char *b)
{
    char *name = NULL;
    return asprintf(&name, "%s%s%s", a, *a ? "." : "", b) < 0 ? NULL : name;
}

static bool is_listed(const char *const *list, int count, const char *name)
{
    for (int i = 0; i < count; i++)
        if (!strcmp(list[i], name))
            return true;
    return false;
}

static td_status add_modules(struct tree *tree, td_module *module, char *name, int parent)
{
    if (tree->count == tree->capacity) {
        int capacity = 2 * tree->capacity + 32;
        struct place *at = realloc(tree->at, (size_t)capacity * sizeof *at);
        if (at) {
            tree->at = at;
            tree->capacity = capacity;
        }
    }
    if (!name || tree->count == tree->capacity) {
        free(name);
        return td__fail_nomem("td_fsdp");
    }
    int mine = tree->count++;
    const td_fsdp_options *options = tree->options;
    tree->at[mine] = (struct place){
        .module = module,
        .name = name,
        .parent = parent,
        .ignored = (parent >= 0 && tree->at[parent].ignored) ||
                   (*name && is_listed(options->ignore, options->ignore_count, name)),
    };
    for (int i = 0; i < module->child_count; i++)
        TD_TRY(add_modules(tree, module->children[i].module, join(name, module->children[i].name),
                           mine));
    return TD_OK;
}

static void free_tree(struct tree *tree)
{
    for (int i = 0; i < tree->count; i++)
        free(tree->at[i].name);
    free(tree->at);
    free(tree->ignored);
}

/* Inner modules come after outer ones in the tree. */
static void choose_units(struct tree *tree)
{
    const td_fsdp_options *options = tree->options;
    for (int m = tree->count - 1; m >= 0; m--) {
        struct place *place = &tree->at[m];
        const td_module_ops *ops = place->module->ops;
        for (int i = 0; i < place->module->parameters.count && !place->ignored; i++)
            place->numel += place->module->parameters.at[i].tensor->layout.numel;
        place->is_unit = m == 0 || place->is_adopted;
        if (!place->is_unit && !place->ignored && (ops->forward || ops->forward_list))
            place->is_unit = (options->min_parameters > 0 &&
                              place->numel >= options->min_parameters) ||
                             is_listed(options->kinds, options->kind_count, ops->name) ||
                             (options->is_unit &&
                              options->is_unit(place->module, place->name, options->arg));
        if (!place->is_unit && place->parent >= 0)
            tree->at[place->parent].numel += place->numel;
    }
}

/* `keep` names units. */
static td_status check_kept(const struct tree *tree)
{
    const td_fsdp_options *options = tree->options;
    for (int i = 0; i < options->keep_count; i++) {
        bool found = false;
        for (int m = 0; m < tree->count && !found; m++)
            found = tree->at[m].is_unit && !strcmp(tree->at[m].name, options->keep[i]);
        if (!found)
            return td_fail(
                TD_ERR_INVALID,
                "td_fsdp: keep has the name \"%s\", but no unit has it; the other options "
                "select which modules are units",
                options->keep[i]);
    }
    return TD_OK;
}

/* ---- Ignored parameters ------------------------------------------------------------------------------------ */

static bool is_ignored(const struct tree *tree, const td_tensor *tensor)
{
    for (int i = 0; i < tree->ignored_count; i++)
        if (tree->ignored[i] == tensor)
            return true;
    return false;
}

static td_status ignore(struct tree *tree, td_tensor *tensor)
{
    if (is_ignored(tree, tensor))
        return TD_OK;
    if (tree->ignored_count == tree->ignored_capacity) {
        int capacity = 2 * tree->ignored_capacity + 16;
        td_tensor **ignored = realloc(tree->ignored, (size_t)capacity * sizeof *ignored);
        if (!ignored)
            return td__fail_nomem("td_fsdp");
        tree->ignored = ignored;
        tree->ignored_capacity = capacity;
    }
    tree->ignored[tree->ignored_count++] = tensor;
    return TD_OK;
}

/* Marks the names of `ignore` that are those of modules, or of parameters of the module. */
static td_status ignore_parameters(struct tree *tree, const struct place *place, bool *named)
{
    const td_fsdp_options *options = tree->options;
    const struct td__module_tensors *own = &place->module->parameters;
    for (int i = 0; i < options->ignore_count; i++)
        named[i] |= *place->name && !strcmp(options->ignore[i], place->name);
    for (int p = 0; p < own->count; p++) {
        char *name = join(place->name, own->at[p].name);
        if (!name)
            return td__fail_nomem("td_fsdp");
        bool is_mine = place->ignored;
        for (int i = 0; i < options->ignore_count; i++)
            if (!strcmp(options->ignore[i], name))
                is_mine = named[i] = true;
        free(name);
        if (is_mine)
            TD_TRY(ignore(tree, own->at[p].tensor));
    }
    return TD_OK;
}

/* A parameter with several names is ignored if one of them is, so that no module finds a shard of it. */
static td_status find_ignored(struct tree *tree)
{
    const td_fsdp_options *options = tree->options;
    if (!options->ignore_count)
        return TD_OK;
    bool *named = calloc((size_t)options->ignore_count, sizeof *named);
    td_status status = named ? TD_OK : td__fail_nomem("td_fsdp");
    for (int m = 0; m < tree->count && !status; m++)
        status = ignore_parameters(tree, &tree->at[m], named);
    for (int i = 0; i < options->ignore_count && !status; i++)
        if (!named[i])
            status = td_fail(
                TD_ERR_INVALID,
                "td_fsdp: ignore has the name \"%s\", but no module and no parameter has it",
                options->ignore[i]);
    free(named);
    return status;
}

/* ---- Parameters ------------------------------------------------------------------------------------------- */

struct found {
    td_tensor *tensor;
    char *name;
    int place; /* of the unit */
};

struct found_list {
    struct found *at;
    int count, capacity;
};

static int unit_around(const struct tree *tree, int m)
{
    while (!tree->at[m].is_unit)
        m = tree->at[m].parent;
    return m;
}

static int depth_of(const struct tree *tree, int m)
{
    int depth = 0;
    for (; tree->at[m].parent >= 0; m = tree->at[m].parent)
        depth++;
    return depth;
}

/* The innermost unit around both. */
static int common_unit(const struct tree *tree, int a, int b)
{
    while (a != b)
        if (depth_of(tree, a) >= depth_of(tree, b))
            a = tree->at[a].parent;
        else
            b = tree->at[b].parent;
    return unit_around(tree, a);
}

static td_status add_parameter(struct found_list *list, const struct tree *tree, int m,
                               const struct td__module_tensor *entry)
{
    int unit = unit_around(tree, m);
    for (int i = 0; i < list->count; i++)
        if (list->at[i].tensor == entry->tensor) {
            list->at[i].place = common_unit(tree, list->at[i].place, unit);
            return TD_OK;
        }
    if (list->count == list->capacity) {
        int capacity = 2 * list->capacity + 64;
        struct found *at = realloc(list->at, (size_t)capacity * sizeof *at);
        if (!at)
            return td__fail_nomem("td_fsdp");
        list->at = at;
        list->capacity = capacity;
    }
    char *name = join(tree->at[m].name, entry->name);
    if (!name)
        return td__fail_nomem("td_fsdp");
    list->at[list->count++] = (struct found){.tensor = entry->tensor, .name = name, .place = unit};
    return TD_OK;
}

/* A parameter of an adopted unit: it is in its flat, under a name that is now longer. */
static td_status adopt_parameter(const struct tree *tree, int m,
                                 const struct td__module_tensor *entry, bool *found)
{
    const struct place *unit = &tree->at[unit_around(tree, m)];
    *found = false;
    for (int u = 0; u < tree->count; u++) {
        struct td__fsdp_unit *adopted = tree->at[u].is_adopted ? tree->at[u].unit : NULL;
        for (int f = 0; adopted && f < adopted->flat_count; f++)
            for (int i = 0; i < adopted->flats[f].count; i++) {
                struct td__fsdp_param *param = &adopted->flats[f].params[i];
                if (param->tensor != entry->tensor)
                    continue;
                char *name = join(tree->at[m].name, entry->name);
                if (!name)
                    return td__fail_nomem("td_fsdp");
                if (&tree->at[u] != unit) {
                    td_fail(TD_ERR_INVALID,
                            "td_fsdp: the parameter \"%s\" is also in the unit \"%s\" of a call "
                            "before; call td_fsdp() first for a module that contains both",
                            name, tree->at[u].name);
                    free(name);
                    return TD_ERR_INVALID;
                }
                free(param->name);
                param->name = name;
                if (param->tensor->shard)
                    param->tensor->shard->name = name;
                *found = true;
                return TD_OK;
            }
    }
    return TD_OK;
}

static td_status find_parameters(const struct tree *tree, struct found_list *list)
{
    for (int m = 0; m < tree->count; m++) {
        const struct td__module_tensors *own = &tree->at[m].module->parameters;
        for (int i = 0; i < own->count; i++) {
            bool adopted;
            TD_TRY(adopt_parameter(tree, m, &own->at[i], &adopted));
            if (!adopted && !is_ignored(tree, own->at[i].tensor))
                TD_TRY(add_parameter(list, tree, m, &own->at[i]));
        }
    }
    return TD_OK;
}

/* ---- Units -------------------------------------------------------------------------------------------------- */

static bool is_floating(td_dtype dtype)
{
    return dtype == TD_F32 || dtype == TD_F64 || dtype == TD_F16 || dtype == TD_BF16;
}

static struct td__fsdp_flat *flat_for(struct td__fsdp_unit *unit, td_tensor *tensor,
                                      const td_fsdp_options *options)
{
    td_dtype dtype = tensor->layout.dtype;
    td_device *device = td__target_of(tensor->storage->device);
    bool requires_grad = td_tensor_requires_grad(tensor);
    for (int f = 0; f < unit->flat_count; f++) {
        struct td__fsdp_flat *flat = &unit->flats[f];
        if (flat->dtype == dtype && flat->device == device && flat->requires_grad == requires_grad)
            return flat;
    }
    struct td__fsdp_flat *flats = realloc(unit->flats,
                                          (size_t)(unit->flat_count + 1) * sizeof *flats);
    if (!flats)
        return NULL;
    unit->flats = flats;
    struct td__fsdp_flat *flat = &flats[unit->flat_count++];
    bool mixed = unit->mixed && is_floating(dtype);
    td_dtype compute = mixed ? options->param_dtype : dtype;
    *flat = (struct td__fsdp_flat){
        .unit = unit,
        .device = device,
        .dtype = dtype,
        .compute = compute,
        .reduce = mixed ? options->reduce_dtype : dtype,
        .requires_grad = requires_grad,
        .is_whole = unit->ranks->size == 1 && compute == dtype &&
                    (!mixed || options->reduce_dtype == dtype),
    };
    return flat;
}

static td_status add_to_flat(struct td__fsdp_unit *unit, struct found *found,
                             const td_fsdp_options *options)
{
    struct td__fsdp_flat *flat = flat_for(unit, found->tensor, options);
    struct td__fsdp_param *params = flat ? realloc(flat->params,
                                                   (size_t)(flat->count + 1) * sizeof *params)
                                         : NULL;
    if (!params)
        return td__fail_nomem("td_fsdp");
    flat->params = params;
    struct td__fsdp_param *param = &params[flat->count++];
    *param = (struct td__fsdp_param){.tensor = td_tensor_retain(found->tensor),
                                     .name = found->name,
                                     .whole = found->tensor->layout};
    found->name = NULL;
    param->whole.dtype = flat->compute;
    td__layout_set_contiguous(&param->whole);
    return TD_OK;
}

static struct td__fsdp_unit *make_unit(struct td__fsdp *fsdp, const struct place *place,
                                       const td_fsdp_options *options, struct td__fsdp_ranks *ranks)
{
    struct td__fsdp_unit *unit = calloc(1, sizeof *unit);
    if (!unit)
        return NULL;
    *unit = (struct td__fsdp_unit){
        .all = fsdp,
        .module = place->module,
        .ranks = ranks,
        .keep = options->strategy == TD_SHARD_GRAD_OP ||
                is_listed(options->keep, options->keep_count, place->name),
        .mixed = options->mixed_precision,
        .param_dtype = options->param_dtype,
        .prefetch = !options->no_prefetch,
    };
    ranks->owners++;
    return unit;
}

static td_status fill_units(struct td__fsdp *fsdp, struct tree *tree, struct found_list *list,
                            struct td__fsdp_ranks *ranks)
{
    fsdp->units = calloc((size_t)(unsigned)tree->count, sizeof(struct td__fsdp_unit *));
    if (!fsdp->units)
        return td__fail_nomem("td_fsdp");
    for (int m = 0; m < tree->count; m++) {
        struct place *place = &tree->at[m];
        if (!place->is_unit)
            continue;
        struct td__fsdp_unit *unit = place->unit;
        if (!unit)
            unit = place->unit = make_unit(fsdp, place, tree->options, ranks);
        char *name = strdup(place->name);
        if (!unit || !name) {
            free(name);
            return td__fail_nomem("td_fsdp");
        }
        free(unit->name);
        unit->name = name;
        unit->all = fsdp;
        unit->number = fsdp->count;
        fsdp->units[fsdp->count++] = unit;
    }
    for (int i = 0; i < list->count; i++)
        TD_TRY(add_to_flat(tree->at[list->at[i].place].unit, &list->at[i], tree->options));
    return TD_OK;
}

/* The flats and parameters no longer move. */
static void set_links(struct td__fsdp *fsdp)
{
    for (int u = 0; u < fsdp->count; u++)
        for (int f = 0; f < fsdp->units[u]->flat_count; f++) {
            struct td__fsdp_flat *flat = &fsdp->units[u]->flats[f];
            flat->unit = fsdp->units[u];
            for (int i = 0; i < flat->count; i++)
                flat->params[i].flat = flat;
        }
}

/* Units of calls before that are inside of this module. */
static void adopt(struct td__fsdp *fsdp, struct tree *tree)
{
    for (int m = 0; m < tree->count; m++) {
        struct td__fsdp *inner = m ? td__fsdp_of(tree->at[m].module) : NULL;
        if (!inner)
            continue;
        for (int u = 0; u < inner->count; u++)
            for (int n = m; n < tree->count; n++)
                if (tree->at[n].module == inner->units[u]->module) {
                    tree->at[n].is_adopted = true;
                    tree->at[n].unit = inner->units[u];
                }
        fsdp->shares |= inner->shares;
        td__fsdp_dissolve(inner);
    }
}

td_status td__fsdp_make_units(struct td__fsdp *fsdp, const td_fsdp_options *options,
                              struct td__fsdp_ranks *ranks)
{
    struct tree tree = {.options = options};
    struct found_list list = {0};
    td_status status = add_modules(&tree, fsdp->module, strdup(""), -1);
    if (!status) {
        adopt(fsdp, &tree);
        choose_units(&tree);
        status = check_kept(&tree);
        if (!status)
            status = find_ignored(&tree);
        if (!status)
            status = find_parameters(&tree, &list);
        td_status filled = fill_units(fsdp, &tree, &list, ranks);
        status = status ? status : filled;
    }
    set_links(fsdp);
    for (int i = 0; i < list.count; i++)
        free(list.at[i].name);
    free(list.at);
    free_tree(&tree);
    return status;
}

void td__fsdp_unit_free(struct td__fsdp_unit *unit)
{
    for (int f = 0; f < unit->flat_count; f++)
        td__flat_free(&unit->flats[f]);
    td__fsdp_ranks_release(unit->ranks);
    free(unit->flats);
    free(unit->name);
    free(unit);
}
