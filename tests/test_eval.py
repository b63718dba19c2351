"The evaluation as a user starts it: papermill from any folder, wrong parameters, a dead endpoint, resuming."
import json, os, re, subprocess, sys, time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NB   = ROOT/'nbs'/'40_eval.ipynb'
SMOKE = ['-p','limit','1', '-p','systems','direct,oracle', '-p','tag','test']

@pytest.fixture(scope='module')
def home(tmp_path_factory):
    "A project folder without any run or index; the converted model is taken from the real one."
    return tmp_path_factory.mktemp('home')

def papermill(tmp_path, *args, nb=NB, cwd=ROOT, timeout=600, home=None, **env):
    out = tmp_path/f'out{len(list(tmp_path.iterdir()))}.ipynb'
    if home: env |= {'CMTRAG_HOME': str(home), 'CMTRAG_CACHE': str(ROOT/'.cache')}
    p = subprocess.run([str(Path(sys.executable).parent/'papermill'), str(nb), str(out), '--log-output', '--no-progress-bar', *args], cwd=cwd,
                       env={**os.environ, 'HF_HUB_OFFLINE':'1', **env}, capture_output=True, text=True, timeout=timeout)
    return p.returncode,p.stdout+p.stderr

def last_line(out, what): return re.findall(rf'{what}: *(.*)', out)[-1].strip()

@pytest.mark.parametrize('args,says', [(['-p','redaer','llama'], ['redaer', 'reader']), (['-p','reader','lama'], ['lama', 'llama', 'smol']), (['-p','limit','abc'], ['limit', 'abc', 'int']),
                                       (['-p','source','/nowhere'], ['/nowhere', 'world']), (['-p','systems','orcale'], ['orcale', 'oracle']), (['-p','profile','smal'], ['smal', 'small', 'paper']),
                                       (['-p','split','devv'], ['devv', 'dev', 'test'])])
def test_wrong_parameters(tmp_path, args, says):
    rc,out = papermill(tmp_path, *args)
    assert rc!=0
    assert all(s in out for s in says), out[-2000:]

def test_no_server_is_said_at_once(tmp_path):
    home = tmp_path/'home'
    home.mkdir()
    t = time.time()
    rc,out = papermill(tmp_path, '-p','reader','llama', home=home, CMTRAG_LLAMA_URL='http://127.0.0.1:9/v1')
    took = time.time()-t
    assert rc!=0 and 'vllm serve meta-llama/Llama-3.3-70B-Instruct' in out and 'CMTRAG_LLAMA_URL' in out, out[-2000:]
    assert not (home/'outputs').exists()
    assert took<60  # 15 s on an idle machine; here other tests run beside it

def records(home, id): return (home/'outputs'/'40_eval'/id/'turns.jsonl').read_text(encoding='utf-8')

def test_same_run_from_anywhere_and_resumed(tmp_path, home):
    runs = [papermill(tmp_path, *SMOKE, cwd=cwd, home=home) for cwd in (ROOT, ROOT/'nbs', '/')]
    for rc,out in runs: assert rc==0, out[-3000:]
    first,*rest = (out for _,out in runs)
    assert not last_line(first, 'answered now').startswith('0 ')
    assert len(list((home/'outputs'/'40_eval').iterdir()))==1
    for again in rest:
        assert last_line(again, 'answered now').startswith('0 ') and last_line(again, 'replies from the model').startswith('0,')
        assert last_line(again, 'run id')==last_line(first, 'run id')
        assert last_line(again, 'table sha')==last_line(first, 'table sha')

def test_another_configuration_never_mixes_in(tmp_path, home):
    a = last_line(papermill(tmp_path, *SMOKE, home=home)[1], 'run id')
    before = records(home, a)
    b = last_line(papermill(tmp_path, *SMOKE, '-p','k','3', home=home)[1], 'run id')
    assert a!=b and records(home, a)==before and records(home, b)!=before
