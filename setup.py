"Packaging for cmtrag: everything is read from settings.ini, so that versions stand in one place."
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

here = Path(__file__).parent
cfg = ConfigParser(interpolation=None, delimiters=['='])
cfg.read(here/'settings.ini', encoding='utf-8')
cfg = cfg['DEFAULT']
extras = {k.removesuffix('_requirements'): v.split() for k,v in cfg.items() if k.endswith('_requirements')}

setup(
    name=cfg['lib_name'], version=cfg['version'], description=cfg['description'], keywords=cfg['keywords'],
    author=cfg['author'], license='Apache-2.0',
    long_description=(here/'README.md').read_text(encoding='utf-8'), long_description_content_type='text/markdown',
    packages=find_packages(include=['cmtrag', 'cmtrag.*']), package_data={'cmtrag': ['params/*.yaml', 'data/*', 'data/span/*', 'data/generators/*/*']},
    python_requires=f">={cfg['min_python']}", install_requires=cfg['requirements'].split(), extras_require=extras,
    entry_points={'nbdev': [f"{cfg['lib_name']}={cfg['lib_path']}._modidx:d"], 'console_scripts': cfg['console_scripts'].split()},
    classifiers=['Intended Audience :: Science/Research', 'Programming Language :: Python :: 3'], zip_safe=False,
)
