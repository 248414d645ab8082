"""Metadata of the package; tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

root = Path(__file__).parent
version = re.search(r'^__version__ = "(.+)"$', (root / "cactus_kernels/__init__.py").read_text(), re.M).group(1)

setup(
    name="cactus-kernels",
    version=version,
    description="Fused speculative-sampling verification (Cactus and SpS) for Hugging Face models, in Triton and torch",
    long_description=(root / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The cactus_kernels developers",
    license="Apache-2.0",
    keywords="speculative decoding, speculative sampling, large language models, inference, triton, transformers, vllm",
    python_requires=">=3.10",
    packages=find_packages(include=["cactus_kernels", "cactus_kernels.*"]),
    package_data={"cactus_kernels": ["py.typed", "assets/*", "assets/*/*", "hub/README.md", "hub/custom_generate/*"]},
    install_requires=[
        "numpy>=1.26",
        "torch>=2.7",
        'triton>=3.3; platform_system == "Linux"',
        "transformers>=5.0",
        "huggingface_hub>=1.3",
        "jinja2>=3.1",
        "typer>=0.16",
        "rich>=13",
    ],
    extras_require={
        "test": [
            "pytest>=8",
            "pytest-benchmark>=4",
            "pytest-timeout>=2",
            "pytest-xdist>=3",
            "scipy>=1.11",
            "accelerate>=1.0",
            "peft>=0.17",
            "ruff>=0.9",
        ],
        "bench": [
            "pytest>=8",
            "pytest-benchmark>=4",
            "economize>=0.3.2",
            'flashspec>=0.3.1; python_version >= "3.11"',
        ],
        "plot": ["matplotlib>=3.8"],
        "vllm": ['vllm>=0.28,<0.34; platform_system == "Linux"'],
    },
    entry_points={
        "console_scripts": ["cactus-kernels=cactus_kernels.cli:main"],
        "vllm.general_plugins": ["cactus_kernels=cactus_kernels.plugins.vllm:register"],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
