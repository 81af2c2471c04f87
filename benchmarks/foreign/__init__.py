"""The models of foreign_models.py: other people's code, with real or random weights.

zoo.py           the model type, and the list of all     packages.py   real weights in packages
language.py      text and speech of transformers         vision.py     timm, torchvision, vision of transformers
page.py          docs/foreign-models.md
"""
