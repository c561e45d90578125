/* Lists of memory that other ranks get; see elastic_internal.h. */
#include "base/fail.h"
#include "elastic/elastic_internal.h"

#include <stdlib.h>

td_status td__pieces_add(struct td__elastic_replica_pieces *list,
                         struct td__elastic_replica_piece piece)
{
    if (list->count == list->room) {
        int room = list->room ? 2 * list->room : 32;
        struct td__elastic_replica_piece *grown = realloc(list->pieces,
                                                          (size_t)room * sizeof *grown);
        if (!grown)
            return td__fail_nomem("td_elastic");
        list->pieces = grown;
        list->room = room;
    }
    list->pieces[list->count++] = piece;
    return TD_OK;
}

td_status td__pieces_add_tensor(struct td__elastic_replica_pieces *list, td_tensor *tensor)
{
    if (!td_tensor_is_contiguous(tensor))
        return td_fail(
            TD_ERR_UNSUPPORTED,
            "td_elastic: a parameter, a buffer or a part of the optimizer's state is not "
            "contiguous; td_contiguous() makes it so");
    return td__pieces_add(list, (struct td__elastic_replica_piece){
                                    .tensor = tensor, .bytes = td_tensor_nbytes(tensor)});
}

void td__pieces_free(struct td__elastic_replica_pieces *list)
{
    free(list->pieces);
    *list = (struct td__elastic_replica_pieces){0};
}
