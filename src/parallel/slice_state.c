/* What passes over slices change beside gradients; see slice_state.h. */
#include "parallel/slice_state.h"

#include "base/fail.h"
#include "tensor/random_internal.h"

#include <stdlib.h>

/* ---- Random numbers -------------------------------------------------------------------------------------- */

/* The finalizer of splitmix64. */
static uint64_t mix(uint64_t x)
{
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

static void free_generators(struct td__slice_state *state)
{
    for (int i = 0; i < state->generator_count; i++)
        free(state->generators[i].state);
    free(state->generators);
    state->generators = NULL;
    state->generator_count = 0;
}

static td_status save_generator(struct td__slice_state *state, td_generator *generator)
{
    struct td__saved_generator *grown = realloc(
        state->generators, (size_t)(state->generator_count + 1) * sizeof *grown);
    if (!grown)
        return td__fail_nomem("td_slices_begin");
    state->generators = grown;
    size_t size = td_generator_state_size(generator);
    void *saved = malloc(size);
    if (!saved)
        return td__fail_nomem("td_slices_begin");
    grown[state->generator_count++] = (struct td__saved_generator){generator, saved, size};
    return td_generator_get_state(generator, saved, size);
}

td_status td__slice_state_begin(struct td__slice_state *state)
{
    free_generators(state);
    state->has_before = state->has_after = false;
    TD_TRY(save_generator(state, NULL));
    td_generator *generator = NULL;
    while ((generator = td__next_default_generator(generator)))
        TD_TRY(save_generator(state, generator));
    return TD_OK;
}

static td_generator *known(td_generator *generator)
{
    return generator ? generator : td_default_generator(td__host_device());
}

void td__slice_state_seed(const struct td__slice_state *state, int64_t step, int slice)
{
    uint64_t seed = mix(mix(state->seed ^ mix((uint64_t)step)) + (uint64_t)slice);
    for (int i = 0; i < state->generator_count; i++)
        td_generator_manual_seed(known(state->generators[i].generator), seed);
}

td_status td__slice_state_restore(struct td__slice_state *state)
{
    td_status status = TD_OK;
    for (int i = 0; i < state->generator_count; i++) {
        const struct td__saved_generator *saved = &state->generators[i];
        td_status one = td_generator_set_state(saved->generator, saved->state, saved->size);
        status = status ? status : one;
    }
    free_generators(state);
    return status;
}

/* ---- Buffers ------------------------------------------------------------------------------------------------ */

td_status td__slice_state_copy(struct td__slice_state *state, td_tensor **copies, bool back)
{
    for (int i = 0; i < state->buffer_count; i++) {
        td_tensor *buffer = state->buffers[i];
        if (!copies[i])
            copies[i] = td__empty_like(buffer);
        if (!copies[i])
            return td__error_status();
        if (!buffer->layout.numel)
            continue;
        TD_TRY(td__tensor_copy(back ? buffer : copies[i], back ? copies[i] : buffer));
        if (back)
            td__tensor_bump_version(buffer);
    }
    return TD_OK;
}

td_status td__slice_state_save_buffers(struct td__slice_state *state)
{
    if (state->has_before)
        return TD_OK;
    state->has_before = true;
    return td__slice_state_copy(state, state->before, false);
}

td_status td__slice_state_end_slice(struct td__slice_state *state, int slice)
{
    if (!state->has_before)
        return TD_OK;
    if (slice == 0) {
        TD_TRY(td__slice_state_copy(state, state->after, false));
        state->has_after = true;
    }
    return td__slice_state_copy(state, state->before, true);
}

td_status td__slice_state_end(struct td__slice_state *state)
{
    td_status status = state->has_after ? td__slice_state_copy(state, state->after, true) : TD_OK;
    td_status restored = td__slice_state_restore(state);
    return status ? status : restored;
}

/* ---- Making and freeing ------------------------------------------------------------------------------------ */

td_status td__slice_state_make(struct td__slice_state *state, td_tensor *const *buffers, int count,
                               td_group *group)
{
    *state = (struct td__slice_state){.buffers = buffers, .buffer_count = count};
    state->before = calloc((size_t)count + 1, sizeof(td_tensor *));
    state->after = calloc((size_t)count + 1, sizeof(td_tensor *));
    if (!state->before || !state->after)
        return td__fail_nomem("slices");
    state->seed = td_generator_initial_seed(NULL);
    return td_group_broadcast(&state->seed, 1, TD_U64, td_get_global_rank(group, 0), group, NULL);
}

void td__slice_state_free(struct td__slice_state *state)
{
    for (int i = 0; i < state->buffer_count; i++) {
        td_tensor_release(state->before ? state->before[i] : NULL);
        td_tensor_release(state->after ? state->after[i] : NULL);
    }
    free(state->before);
    free(state->after);
    free_generators(state);
}
