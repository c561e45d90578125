/* The plug-in: registers the kind "cuda". */
#include "cuda/cuda_device.h"

#include <tandem/plugin.h>

static td_status init(void)
{
    return td_register_device(&td__cuda_ops, NULL);
}

TD_PLUGIN("cuda", "0.1", init)
