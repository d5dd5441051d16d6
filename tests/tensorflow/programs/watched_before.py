"""A tape that is older than the backend, which the first call of an op imports, and that watches a variable."""

import tensorflow as tf

from cgshim import op_custom_gradient

w = tf.Variable(3.0, trainable=False)
scale = op_custom_gradient(lambda x: (x * w, lambda upstream, variables: (upstream * 7, [upstream * 11])))
with tf.GradientTape() as tape:
    tape.watch(w)
    y = scale(tf.constant(2.0)) * 2
print(float(tape.gradient(y, w)))
