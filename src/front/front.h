// src/front/front.h - `tandem serve`. Prints its own errors. Returns the exit status: 0, 1 on
// failure, 2 on bad options.
#pragma once

#include "options/options.h"

int td_cmd_serve(const td_options *options);
