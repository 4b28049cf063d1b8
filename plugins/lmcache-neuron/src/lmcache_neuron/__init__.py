"""LMCache's device plugin for AWS Trainium and Inferentia. Importing it loads neither torch nor the Neuron SDK."""
