// src/engine/attn/rope.c - rotary position tables and the attention scale, with and without YaRN.
#include "engine/attn/rope.h"

#include <math.h>
#include <stdbool.h>

#define PI 3.14159265358979323846

uint32_t td_rope_dims(const td_model_config *config) {
  return config->rope_dim ? config->rope_dim : config->head_dim;
}

static bool has_yarn(const td_yarn *yarn) {
  return yarn->factor > 1;
}

static double yarn_mscale(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * log(factor) + 1.0;
}

static double attention_factor(const td_yarn *yarn) {
  if (!has_yarn(yarn)) return 1.0;
  if (yarn->attention_factor > 0) return yarn->attention_factor;
  if (yarn->mscale > 0 && yarn->mscale_all_dim > 0) {
    return yarn_mscale(yarn->factor, yarn->mscale) /
           yarn_mscale(yarn->factor, yarn->mscale_all_dim);
  }
  return yarn_mscale(yarn->factor, 1);
}

// The dimension whose frequency makes n_rotations turns over the original context.
static double correction_dim(const td_model_config *config, double n_rotations) {
  return td_rope_dims(config) * log(config->yarn.original_max_position / (n_rotations * 2 * PI)) /
         (2 * log(config->rope_theta));
}

// Share of the unscaled frequency for pair i: 1 keeps it, 0 interpolates (slow pairs).
static float yarn_keep(const td_model_config *config, uint32_t i) {
  const bool rounds = !config->yarn.untruncated;
  double low = correction_dim(config, config->yarn.beta_fast);
  double high = correction_dim(config, config->yarn.beta_slow);
  low = fmax(rounds ? floor(low) : low, 0);
  high = fmin(rounds ? ceil(high) : high, td_rope_dims(config) - 1.0);
  if (low == high) high += 0.001;
  float ramp = ((float)i - (float)low) / (float)(high - low);
  return 1.0f - fminf(fmaxf(ramp, 0.0f), 1.0f);
}

static float inverse_frequency(const td_model_config *config, uint32_t i) {
  float exponent = (float)(2 * i) / (float)td_rope_dims(config);
  float frequency = powf((float)config->rope_theta, exponent);
  if (!has_yarn(&config->yarn)) return 1.0f / frequency;
  float keep = yarn_keep(config, i);
  return 1.0f / ((float)config->yarn.factor * frequency) * (1.0f - keep) + 1.0f / frequency * keep;
}

void td_rope_fill(float *out, const td_model_config *config, uint32_t n_positions) {
  uint32_t n_pairs = td_rope_dims(config) / 2;
  float factor = (float)attention_factor(&config->yarn);
  for (uint32_t i = 0; i < n_pairs; i++) {
    float inverse = inverse_frequency(config, i);
    for (uint32_t p = 0; p < n_positions; p++) {
      float angle = (float)p * inverse;
      float *pair = out + ((size_t)p * n_pairs + i) * 2;
      pair[0] = cosf(angle) * factor;
      pair[1] = sinf(angle) * factor;
    }
  }
}

static uint32_t axis_of(const td_model_config *c, uint32_t pair) {
  if (!c->axes_interleaved) return pair < c->axes[0] ? 0 : pair < c->axes[0] + c->axes[1] ? 1 : 2;
  const uint32_t axis = pair % 3;
  return pair < 3 * c->axes[axis] ? axis : 0;
}

void td_rope_fill_axes(float *out, const td_model_config *config, const int32_t position[3]) {
  const float factor = (float)attention_factor(&config->yarn);
  for (uint32_t i = 0; i < td_rope_dims(config) / 2; i++) {
    const float angle = (float)position[axis_of(config, i)] * inverse_frequency(config, i);
    out[2 * i] = cosf(angle) * factor;
    out[2 * i + 1] = sinf(angle) * factor;
  }
}

void td_rope_fill_near(float *out, const td_model_config *config, uint32_t n_positions) {
  td_model_config plain = *config;
  plain.yarn = (td_yarn){.factor = 1};
  td_rope_fill(out, &plain, n_positions);
}

void td_rope_fill_pooled(float *out, const td_model_config *config, uint32_t n_positions) {
  td_model_config pooled = *config;
  pooled.rope_theta = config->pool_theta;
  td_rope_fill(out, &pooled, n_positions);
}

void td_rope_fill_wide(float *out, const td_model_config *c, uint32_t n_positions) {
  const uint32_t n_pairs = c->wide_head_dim / 2;
  for (uint32_t i = 0; i < n_pairs; i++) {
    const float exponent = (float)(2 * i) / (float)c->wide_head_dim;
    const float inverse = i < c->wide_pairs ? 1.0f / powf((float)c->wide_theta, exponent) : 0;
    for (uint32_t p = 0; p < n_positions; p++) {
      float *pair = out + ((size_t)p * n_pairs + i) * 2;
      pair[0] = cosf((float)p * inverse);
      pair[1] = sinf((float)p * inverse);
    }
  }
}

void td_query_scale_fill(float *out, const td_model_config *config, uint32_t n_positions) {
  for (uint32_t p = 0; p < n_positions; p++)
    out[p] = 1 + (float)config->query_beta * logf(1 + (float)(p / config->query_span));
}

double td_rope_score_factor(const td_model_config *config) {
  if (!has_yarn(&config->yarn) || config->yarn.mscale_all_dim <= 0) return 1;
  const double mscale = yarn_mscale(config->yarn.factor, config->yarn.mscale_all_dim);
  return mscale * mscale;
}
