"""The seeded generator of the demo model's training and evaluation conversations.

Everything random comes from one `draw.Draw`; the same seed gives the same conversations on every
machine and in every process. The order of draws is therefore part of the generator's behaviour.
"""
