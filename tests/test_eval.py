"The evaluation as a user starts it: papermill from any folder, wrong parameters, a dead endpoint, resuming."
import json, os, re, subprocess, sys, time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NB   = ROOT/'nbs'/'40_eval.ipynb'
SMOKE = ['-p','limit','1', '-p','systems','direct,oracle', '-p','tag','test']

def papermill(tmp_path, *args, cwd=ROOT, timeout=600, **env):
    out = tmp_path/f'out{len(list(tmp_path.iterdir()))}.ipynb'
    p = subprocess.run([str(Path(sys.executable).parent/'papermill'), str(NB), str(out), '--log-output', '--no-progress-bar', *args], cwd=cwd,
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
    before = set((ROOT/'outputs'/'_index').glob('*/*')) if (ROOT/'outputs'/'_index').exists() else set()
    t = time.time()
    rc,out = papermill(tmp_path, '-p','reader','llama', CMTRAG_LLAMA_URL='http://127.0.0.1:9/v1')
    took = time.time()-t
    after = set((ROOT/'outputs'/'_index').glob('*/*')) if (ROOT/'outputs'/'_index').exists() else set()
    assert rc!=0 and 'vllm serve meta-llama/Llama-3.3-70B-Instruct' in out and 'CMTRAG_LLAMA_URL' in out, out[-2000:]
    assert before==after
    assert took<60  # 15 s on an idle machine; here other tests run beside it

def test_same_run_from_anywhere_and_resumed(tmp_path):
    runs = [papermill(tmp_path, *SMOKE, cwd=cwd) for cwd in (ROOT, ROOT/'nbs', '/')]
    for rc,out in runs: assert rc==0, out[-3000:]
    assert len({last_line(out, 'run id') for _,out in runs})==1
    first,second,third = (out for _,out in runs)
    for again in second,third:
        assert last_line(again, 'answered now').startswith('0 ')
        assert last_line(again, 'table sha')==last_line(first, 'table sha')

def test_another_configuration_never_mixes_in(tmp_path):
    a = papermill(tmp_path, *SMOKE)[1]
    b = papermill(tmp_path, *SMOKE, '-p','k','3')[1]
    assert last_line(a, 'run id')!=last_line(b, 'run id')
