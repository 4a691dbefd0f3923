"""Flow-matching policies: the sampler that draws, its log-probs, and windows of stochastic steps.

A flow-matching model predicts the velocity v of the path x_t = (1 - t) x_0 + t e from a picture x_0 to noise e, so
v = e - x_0. To draw, x_1 is noise, and the sampler follows the path from t = 1 to t = 0 in a few denoising steps. To train
the model by policy gradients, some steps are random. Each random step has a log-prob, like a sampled token.

In the annotations, `steps` is an axis of (picture, denoising step) pairs, and `...` stands for the axes of one picture
(channels, height, width).
"""
