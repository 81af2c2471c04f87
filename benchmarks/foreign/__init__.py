"""The models that foreign_models.py compiles: other people's code, with real or random weights.

zoo.py           what a model is, and all of them        packages.py   real weights that packages bring
language.py      text and speech of transformers         vision.py     timm, torchvision, vision of transformers
page.py          docs/foreign-models.md
"""
