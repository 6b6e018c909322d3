// src/text/jinja/number.h - arithmetic shared by operators and filters.
#ifndef TD_TEXT_JINJA_NUMBER_H
#define TD_TEXT_JINJA_NUMBER_H

#include "text/jinja/jinja.h"

// a op b for two numbers; raises on overflow and on division by zero.
jj_value jj_arith(jj *j, jj_op op, jj_value a, jj_value b);

#endif
