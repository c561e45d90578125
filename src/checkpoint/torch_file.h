/* Files of torch.save(), for other files of this component. */
#ifndef TD_CHECKPOINT_TORCH_FILE_H
#define TD_CHECKPOINT_TORCH_FILE_H

#include <tandem/checkpoint.h>

/** Whether a file begins as a zip archive does. */
bool td__is_zip_file(const char *path);

/** td_load_torch() for calls of other names. */
td_status td__load_torch(const char *call, const char *path, const td_map_location *map,
                         td_state **state);

#endif
