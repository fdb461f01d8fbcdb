"""How the demo model is made: data generator, training, export and evaluation."""
