/* Tandem: distributed training for C. This header includes all the others. */
#ifndef TANDEM_TANDEM_H
#define TANDEM_TANDEM_H

#include <tandem/amp.h>
#include <tandem/autograd.h>
#include <tandem/backend.h>
#include <tandem/base.h>
#include <tandem/checkpoint.h>
#include <tandem/collective.h>
#include <tandem/data.h>
#include <tandem/device.h>
#include <tandem/dist.h>
#include <tandem/dist_autograd.h>
#include <tandem/dist_optimizer.h>
#include <tandem/dlpack.h>
#include <tandem/dtype.h>
#include <tandem/elastic.h>
#include <tandem/fsdp.h>
#include <tandem/group.h>
#include <tandem/launch.h>
#include <tandem/nn.h>
#include <tandem/ops.h>
#include <tandem/optim.h>
#include <tandem/parallel.h>
#include <tandem/pipeline.h>
#include <tandem/plugin.h>
#include <tandem/random.h>
#include <tandem/rendezvous.h>
#include <tandem/rpc.h>
#include <tandem/state.h>
#include <tandem/store.h>
#include <tandem/tensor.h>
#include <tandem/value.h>

#endif
