/* Tandem: distributed training for C. This header includes all the others. */
#ifndef TANDEM_TANDEM_H
#define TANDEM_TANDEM_H

#include <tandem/autograd.h>
#include <tandem/backend.h>
#include <tandem/base.h>
<<<<<<< HEAD
#include <tandem/data.h>
=======
#include <tandem/device.h>
>>>>>>> c850862 (Devices, scopes, and a record of what was computed that backward passes walk)
#include <tandem/dist.h>
#include <tandem/dtype.h>
#include <tandem/group.h>
#include <tandem/launch.h>
#include <tandem/random.h>
#include <tandem/ops.h>
#include <tandem/rendezvous.h>
#include <tandem/store.h>
#include <tandem/tensor.h>

#endif
