"""A small training run on the GPU of the pod. Fails without a GPU, or if the model does not learn."""

import sys

import tensorflow as tf


def main() -> int:
    gpus = tf.config.list_physical_devices("XPU")
    if not gpus:
        print("TensorFlow finds no GPU", file=sys.stderr)
        return 1
    print(f"training on {gpus[0].name}")
    tf.random.set_seed(1)
    with tf.device("/XPU:0"):
        points = tf.random.uniform((4096, 2), -1.0, 1.0)
        inside = tf.cast(tf.norm(points, axis=1, keepdims=True) < 0.8, tf.float32)
        model = tf.keras.Sequential(
            [tf.keras.layers.Dense(64, activation="relu"), tf.keras.layers.Dense(1, activation="sigmoid")]
        )
        model.compile(optimizer=tf.keras.optimizers.Adam(0.01), loss="binary_crossentropy", metrics=["accuracy"])
        model.fit(points, inside, batch_size=512, epochs=30, verbose=2)
        _loss, right = model.evaluate(points, inside, batch_size=4096, verbose=0)
    print(f"{right:.1%} of the points are classified correctly")
    return 0 if right > 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
