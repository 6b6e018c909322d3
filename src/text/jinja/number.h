// src/text/jinja/number.h - arithmetic shared by operators and filters.
#pragma once

#include "text/jinja/jinja.h"

// a op b for two numbers; raises on overflow and on division by zero.
jj_value jj_arith(jj *j, jj_op op, jj_value a, jj_value b);
