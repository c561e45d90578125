/* Which elements the ranks mirror, and where these are in their memory; see fsdp_mirror.h. */
#include "base/fail.h"
#include "parallel/fsdp_mirror.h"

#include <stdlib.h>

enum { LINE = 64 };

static size_t align(size_t bytes)
{
    return (bytes + LINE - 1) / LINE * LINE;
}

static int count_flats(const struct td__fsdp *fsdp)
{
    int count = 0;
    for (int u = 0; u < fsdp->count; u++)
        count += fsdp->units[u]->flat_count;
    return count;
}

td_status td__mirror_lay_out(struct td__fsdp *fsdp, const struct td__mirror_place *places, int size,
                             int shards, struct td__mirror_layout *layout)
{
    int count = count_flats(fsdp);
    *layout = (struct td__mirror_layout){
        .size = size,
        .places = places,
        .flats = calloc((size_t)count + 1, sizeof *layout->flats),
        .cuts = calloc((size_t)count + 1, sizeof *layout->cuts),
    };
    if (!layout->flats || !layout->cuts)
        return td__fail_nomem("td_fsdp");
    for (int u = 0; u < fsdp->count; u++)
        for (int f = 0; f < fsdp->units[u]->flat_count; f++) {
            struct td__fsdp_flat *flat = &fsdp->units[u]->flats[f];
            layout->flats[layout->flat_count] = flat;
            TD_TRY(td__flat_cut_for(flat, shards, &layout->cuts[layout->flat_count]));
            layout->flat_count++;
        }
    return TD_OK;
}

void td__mirror_layout_free(struct td__mirror_layout *layout)
{
    for (int i = 0; layout->cuts && i <= layout->flat_count; i++)
        free(layout->cuts[i]);
    free(layout->cuts);
    free(layout->flats);
}

int64_t td__mirror_range(const struct td__mirror_layout *layout, int rank, int flat, int64_t *first)
{
    const struct td__mirror_place *place = &layout->places[rank];
    int64_t begin = layout->cuts[flat][place->shard];
    int64_t count = layout->cuts[flat][place->shard + 1] - begin;
    int64_t from = td__part_begin(count, place->part, place->parts);
    *first = begin + from;
    return td__part_begin(count, place->part + 1, place->parts) - from;
}

static size_t plane_bytes(const struct td__mirror_layout *layout, int rank, int flats)
{
    size_t bytes = 0;
    for (int i = 0; i < flats; i++) {
        int64_t first;
        bytes += align((size_t)td__mirror_range(layout, rank, i, &first) *
                       td_dtype_size(layout->flats[i]->dtype));
    }
    return bytes;
}

size_t td__mirror_offset(const struct td__mirror_layout *layout, int rank, int plane, int flat)
{
    return (size_t)plane * plane_bytes(layout, rank, layout->flat_count) +
           plane_bytes(layout, rank, flat);
}
